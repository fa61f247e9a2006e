"""Does a chat template look into contents, or only write them? Read off its Jinja syntax, on the safe side.

A template that does nothing with contents but to write them, to trim them, and to ask whether there is one writes the
same around them whatever they say. One that compares them, counts or cuts them, hands them to a macro, or tells the
time, may not.
"""

from __future__ import annotations

from jinja2 import Environment, TemplateSyntaxError, nodes

_WRITERS = (
    nodes.Output,
    nodes.Concat,
    nodes.Add,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.CondExpr,
    nodes.If,
    nodes.Assign,
)
"""What takes a content and lets none of its characters decide anything; but whether it is empty."""
_FILTERS = {"trim", "string", "tojson"}
_TESTS = {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "true", "false"}


def may_look_inside(source: str) -> bool:
    """Whether what the template writes around a content may depend on what it says, or on the time.

    >>> may_look_inside("{{ '<u>' + m.content | trim }}"), may_look_inside("{% if '!' in m.content %}x{% endif %}")
    (False, True)
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateSyntaxError:  # tags of another library
        return True
    if any(name.name == "strftime_now" for name in tree.find_all(nodes.Name)):
        return True
    if any(_compares_values(comparison) for comparison in tree.find_all(nodes.Compare)):
        return True
    names = _named_contents(tree)
    return names is None or _misused(tree, names, written=True)


def _compares_values(comparison: nodes.Compare) -> bool:
    """Whether two values are compared, which may be messages with their contents."""
    operands = [comparison.expr, *(operand.expr for operand in comparison.ops)]
    return not any(isinstance(operand, nodes.Const | nodes.List | nodes.Tuple) for operand in operands)


def _named_contents(tree: nodes.Template) -> set[str] | None:
    """The variables that hold contents; None: one is kept where it cannot be followed."""
    names: set[str] = set()
    while True:
        found = set(names)
        for assign in tree.find_all(nodes.Assign):
            if _holds_content(assign.node, names):
                if not isinstance(assign.target, nodes.Name):
                    return None
                found.add(assign.target.name)
        if found == names:
            return names
        names = found


def _holds_content(node: nodes.Node, names: set[str]) -> bool:
    return _is_content(node, names) or any(_holds_content(child, names) for child in node.iter_child_nodes())


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.ctx == "load" and node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _misused(node: nodes.Node, names: set[str], *, written: bool) -> bool:
    """Whether a content stands somewhere below `node` where more is done than to write it. `written`: it may stand at
    `node` itself."""
    if _is_content(node, names):
        return not written
    if isinstance(node, nodes.Filter):
        fine = node.name in _FILTERS
    elif isinstance(node, nodes.Test):
        fine = node.name in _TESTS
    else:
        fine = isinstance(node, _WRITERS)
    return any(_misused(child, names, written=fine) for child in node.iter_child_nodes())
