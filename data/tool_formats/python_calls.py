"""Calls in Python's syntax, read and never run: where a bracket ends, and what the arguments between two are.

    search(query="a, b)", limit=3, tags=["x"], exact=True, before=None)

Values are literals. `true`, `false` and `null` are understood, because chat templates write a mapping as JSON. Names
of tools and arguments are read as text, so `from` and `max-results`, which Python itself refuses, are names too.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from typing import Any

from data.jsonl import plain_json
from data.tool_formats.parts import Malformed, shown

_STRING = r'\'\'\'(?:[^\\]|\\.)*?\'\'\'|"""(?:[^\\]|\\.)*?"""|\'(?:[^\'\\]|\\.)*\'|"(?:[^"\\]|\\.)*"'
_COMMENT = r"#[^\n]*"
_TOKENS = re.compile(
    rf"{_STRING}|{_COMMENT}|(?P<open>[\[({{])|(?P<close>[\])}}])|(?P<comma>,)|(?P<quote>['\"])", re.DOTALL
)
_COMMENTS = re.compile(rf"(?P<string>{_STRING})|{_COMMENT}", re.DOTALL)
KEYWORD = re.compile(r"\s*([^\W\d][\w.-]*)\s*=(?!=)")
_DEFINED = r"\b(?:def|class|function|func|fn)[ \t]+{0}\b|\bimport\b[^\n]*\b{0}\b"
_LINE_END = re.compile(r"[ \t;]*(?:#[^\n]*)?$", re.MULTILINE)
_NAMES = {"true": True, "false": False, "null": None}
_MAX_BITS = 4096
"""Of an integer: every writer must be able to write it in decimal digits."""


def bracket_end(text: str, start: int) -> int:
    """The place behind the bracket that closes the one at `start`.

    Raises:
        Malformed: it, or a string, stays open, or another bracket is closed first.

    >>> bracket_end("f(')', [1])!", 1)
    11
    """
    opened: list[str] = []
    for found in _TOKENS.finditer(text, start):
        if found["quote"]:
            raise Malformed("a string is not closed", start, at_end=True)
        if found["open"]:
            opened.append(found["open"])
        if not found["close"]:
            continue
        if opened.pop() + found["close"] not in ("()", "[]", "{}"):
            raise Malformed(f"{found['close']!r} closes another bracket", found.start())
        if not opened:
            return found.end()
    raise Malformed("a bracket is not closed", start, at_end=True)


def read_arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments between two brackets, those without a name and those with one.

    Raises:
        ValueError: one cannot be read, or a name stands twice.

    >>> read_arguments("1, x=[2, None]")
    ([1], {'x': [2, None]})
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    without_comments = _COMMENTS.sub(lambda found: found["string"] or "", text)
    for piece in pieces(without_comments):
        keyword = KEYWORD.match(piece)
        try:
            value = _literal(piece[keyword.end() :] if keyword else piece)
        except ValueError as error:
            where = f" of {shown(keyword[1])}" if keyword else ""
            raise ValueError(f"the value{where} {error}") from error
        if not keyword:
            positional.append(value)
        elif keyword[1] in named:
            raise ValueError(f"the argument {shown(keyword[1])} stands twice")
        else:
            named[keyword[1]] = value
    return positional, named


def statement_end(text: str, name: str, start: int, end: int, *, inside: str = "") -> int | None:
    """The end of a line that nothing but a call begins, whose brackets are `start` and `end`; None where it is no
    statement, but a part of prose or of other code. So is a call with values that are no literals, and of a function
    that the text itself defines or imports.

    Args:
        inside: brackets that may close behind it.

    >>> statement_end("f(x=1)  # now", "f", 1, 6), statement_end("f(x=1) is 2", "f", 1, 6)
    (13, None)
    """
    line_end = _LINE_END.match(text, end + (text.startswith(inside, end) and len(inside)))
    if not line_end or re.search(_DEFINED.format(re.escape(name)), text):
        return None
    try:
        read_arguments(text[start + 1 : end - 1])
    except ValueError:
        return None
    return line_end.end()


def pieces(text: str) -> Iterator[str]:
    """What stands between the outer commas; nothing behind the last one is no piece."""
    depth, begin = 0, 0
    for found in _TOKENS.finditer(text):
        depth += bool(found["open"]) - bool(found["close"])
        if found["comma"] and depth == 0:
            yield text[begin : found.start()]
            begin = found.end()
    if text[begin:].strip():
        yield text[begin:]


def _literal(text: str) -> Any:
    """The value of a literal.

    Raises:
        ValueError: it is none; the message goes on behind "the value".
    """
    if not text.strip():
        raise ValueError("is missing")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an escape that Python does not know: it stays as written
            tree = ast.parse(f"({text}\n)", mode="eval")
        return plain_json(_value(tree.body))
    except SyntaxError as error:
        # Python's own words about a number of thousands of digits name a setting of the host.
        reason = "has a number that is too long" if "digits" in error.msg else f"cannot be read ({error.msg})"
        raise ValueError(reason) from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:
        reason = str(error)
        raise ValueError(reason if reason.startswith("is ") else f"cannot be taken: {reason}") from error


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            # Escapes as JSON has them: two halves of a surrogate pair are one character.
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        case ast.Constant(value=None | bool() | float() as value):
            return value
        case ast.Constant(value=int() as value):
            if value.bit_length() > _MAX_BITS:
                raise ValueError("a number is too long")
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant() as operand):
            number = _value(operand)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.List() | ast.Tuple():
            return [_value(item) for item in node.elts]
        case ast.Dict():
            return _mapping(node)
    raise ValueError(f"is no literal: {shown(ast.unparse(node))}; a text stands in quotes")


def _mapping(node: ast.Dict) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, item in zip(node.keys, node.values, strict=True):
        name = _value(key) if key else None
        if not isinstance(name, str):
            raise ValueError("is a mapping with a key that is no text")
        if name in mapping:
            raise ValueError(f"is a mapping with the key {shown(name)} twice")
        mapping[name] = _value(item)
    return mapping
