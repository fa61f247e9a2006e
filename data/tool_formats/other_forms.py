"""Calls in forms that no format of ours reads: what a model falls back on when it forgets the form that it was shown.

    {"type": "function", "function": {"name": "lookup", "arguments": {}}}
    {'action': 'lookup', 'action_input': {'key': 'area of Paris'}}
    lookup(key="area of Paris")
    <invoke name="lookup">

Nothing here is run: it is found, so that it does not pass for a final answer. Prose stays prose: a tool that is only
mentioned, inline code, code that quotes a call or goes on behind it, data that holds a tool's name somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from data.tool_formats.asked import ARGUMENT_KEYS, NAME_KEYS, asked_for, asked_for_in, describes_tool
from data.tool_formats.fences import FENCE, NOT_QUOTED, code_end, without_code
from data.tool_formats.json_calls import json_end, read_json
from data.tool_formats.parts import Malformed
from data.tool_formats.python_calls import bracket_end, read_arguments, statement_end
from envs.types import ToolSpec

_MAX_TRIES = 32
"""Places at which brackets are tried: where none of them closes, each try reads the rest of the turn."""
_WRAPPERS = ("function", "function_call", "tool_call", "tool_calls", "tool_uses")
_VALUE = re.compile(rf"""{FENCE}|{NOT_QUOTED}\{{(?=\s*(?:["'}}]|\w+\s*:))|\[(?=\s*\{{)""", re.MULTILINE)
_PREFIX = r"(?:functions\.|default_api\.)?"


def called_in_other_forms(content: str, tools: Sequence[ToolSpec]) -> list[str]:
    """The names of the tools that `content` calls, in the first of the forms in which it calls any.

    >>> lookup = ToolSpec(name="lookup", description="", parameters={})
    >>> called_in_other_forms('lookup(key="a")', [lookup]), called_in_other_forms("I used lookup.", [lookup])
    (['lookup'], [])
    """
    if called := [name for value in _values(content) for name in _named(value, tools)]:
        return called
    known = [name for name in sorted({tool.name for tool in tools}, key=len, reverse=True) if name in content]
    if not known:
        return []
    name = f"(?P<name>{'|'.join(map(re.escape, known))})"
    return list(_marked(without_code(content), name)) or list(_stated(content, name))


def _values(text: str) -> Iterator[Any]:
    """The JSON objects and lists of objects in a text, and the ones that Python would write; the text of those that
    cannot be read."""
    place, tries = 0, 0
    while (found := _VALUE.search(text, place)) and tries < _MAX_TRIES:
        if found["fence"] or found["inline"]:
            place = code_end(text, found, was_cut=False) or found.end()
            continue
        try:
            value, place = read_json(text, found.start())
        except Malformed as error:
            tries += 1
            start = found.start()
            value, place = _python_value(text, start, max(error.place, found.end()))
            if value is None:
                value = text[start : json_end(text, start, len(text))]
        yield value


def _python_value(text: str, start: int, otherwise: int) -> tuple[Any, int]:
    """The literal at `start` and the place behind it; None and another place where there is none."""
    try:
        end = bracket_end(text, start)
        positional, _ = read_arguments(text[start:end])
    except (Malformed, ValueError):
        return None, otherwise
    return positional[0], end


def _named(value: Any, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """The tools that an object, or each object of a list, calls. Without any tools, a name and arguments are enough."""
    if isinstance(value, str) and (name := asked_for_in(value, tools)):
        yield name
    if isinstance(value, list):
        for one in value:
            yield from _named(one, tools)
    if not isinstance(value, dict) or describes_tool(value):
        return
    for key in _WRAPPERS:
        if isinstance(value.get(key), dict | list):
            yield from _named(value[key], tools)
    if name := asked_for(value, tools):
        yield name
    elif not tools and ARGUMENT_KEYS & value.keys():
        yield from [value[key] for key in NAME_KEYS if isinstance(value.get(key), str)][:1]


def _marked(text: str, name: str) -> Iterator[str]:
    """The tools that stand where a model's marks, or a label of ReAct, want the name of a tool."""
    tag = r"<(?!/)[^<>\n]{0,30}(?:tool|function|call)[^<>\n]{0,30}>"
    between = r"(?:\s|<[^<>\n]{1,40}>|function(?=\W)|functions\.|call:){0,16}"
    forms = (
        rf"{tag}{between}{name}(?=[ \t]*(?:[<{{(\[:]|$))",
        rf"""<[^<>\n/]{{0,20}}(?:invoke|function)(?:[ \t]+name)?[ \t]*=[ \t]*["']?{name}["']?[ \t]*>""",
        rf"\bto=functions\.{name}(?![\w-])",
        rf"^[ \t]*(?:\*\*)?(?i:action)(?:\*\*)?[ \t]*:(?:\*\*)?[ \t]*{name}(?:[(\[]|[ \t]*\n\s*(?i:action input))",
    )
    for form in forms:
        called = [found["name"] for found in re.finditer(form, text, re.MULTILINE)]
        if called:
            yield from called
            return


def _stated(text: str, name: str) -> Iterator[str]:
    """The tools that a statement of Python's calls with literals, alone on its line; behind the label of a tool's code
    it may be printed or kept too. A function that the text itself defines or imports is no tool."""
    head = rf"(?:^ {{0,3}}|(?P<kept>^[ \t]*```tool[\w-]*[ \t]*\n\s*(?:\w+[ \t]*=[ \t]*)?(?:print\()?)){_PREFIX}{name}\("
    for found in islice(re.finditer(head, text, re.MULTILINE), _MAX_TRIES):
        start = found.end() - 1
        with suppress(Malformed):
            end = bracket_end(text, start)
            if statement_end(text, found["name"], start, end, inside=")" if found["kept"] else "") is not None:
                yield found["name"]
