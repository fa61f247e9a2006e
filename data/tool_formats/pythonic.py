"""Pythonic calls, as Llama 3.2, Llama 4, ToolACE and LFM2 write them: a list of calls with named arguments.

    [lookup(key="area of Paris"), now()]

A list is a call where it begins a line or names a known tool; other brackets are prose, and so are a part of a
statement, inline code, and a labelled block of code that holds more than a call. LFM2's `<|tool_call_start|>`
and Llama's `<|python_tag|>` may stand before it. A list that cannot be read ends with its line. A known tool that is
called alone on its line, without a list, is an error.
"""

from __future__ import annotations

import re

from data.tool_formats.fences import FENCE, block_end
from data.tool_formats.python_calls import bracket_end, read_arguments, statement_end
from data.tool_formats.turn import (
    Bad,
    Block,
    Call,
    Grammar,
    Malformed,
    Reading,
    end_of_line,
    is_over,
    rest_of_block,
    skip_blank,
)

_NAME = r"[^\W\d][\w.-]*"
_MARK = r"<\|(?:tool_call_start|python_tag)\|>"
_OPENER = re.compile(
    rf"{FENCE}|(?P<mark>{_MARK}(?:\s*\[)?)|\[(?=\s*(?P<listed>{_NAME})\s*\()|^ {{0,3}}(?P<bare>{_NAME})\(", re.MULTILINE
)
_IN_CODE = re.compile(r"""[=(,\[{"'][ \t]*\Z""")
_ALONE = re.compile(rf"\[(?=\s*{_NAME}\s*\()|{_NAME}\(")
_NEXT = re.compile(rf"{_MARK}|^[ \t]*\[\s*{_NAME}\s*\(", re.MULTILINE)
_CALL = re.compile(rf"({_NAME})\s*\(")
_MAYBE_CALL = re.compile(rf"(?:{_NAME}\s*)?\Z")
_BETWEEN = re.compile(r"(?:\s|#[^\n]*)*")
_NO_LIST = "calls stand in a list, [...]"
_INNER = re.compile(r"(?P<close><\|tool_call_end\|>)")
_END_MARK = re.compile(r"\s*<\|tool_call_end\|>")


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text, calls = reading.text, list[Call | Bad]()
    if found["inline"] or found["fence"]:
        return Block((), _behind_code(reading, found), is_prose=True)
    if not _begins_call(reading, found):
        return Block((), found.end(), is_prose=True)
    try:
        if found["bare"]:
            return _without_list(text, found)
        end = _read_list(text, found, calls)
    except Malformed as error:
        return rest_of_block(reading, error, before=calls, opener=_NEXT, end=end_of_line(text, error))
    end_mark = _END_MARK.match(text, end)
    return Block(tuple(calls), end_mark.end() if end_mark else end)


def _behind_code(reading: Reading, found: re.Match[str]) -> int:
    """The place behind inline code, or a labelled block that shows code; else the place where calls are looked for."""
    text = reading.text
    if found["inline"]:
        return found.end()
    if found["blank"] or not found["label"]:
        return found.end("fence")
    end = block_end(text, found)
    if end is None:
        return len(text) if reading.was_cut else found.end("label")
    start = _behind_blanks(text, found.end())
    opening = _ALONE.match(text, start)
    try:
        alone = opening is not None and skip_blank(text, bracket_end(text, opening.end() - 1))
    except Malformed:
        return found.end("label")  # it is told what is wrong with it
    return found.end("label") if alone and text.startswith(found["fence"].strip(), alone) else end


def _begins_call(reading: Reading, found: re.Match[str]) -> bool:
    if found["mark"]:
        return True
    line = reading.text.rfind("\n", 0, found.start()) + 1
    if found["listed"] and skip_blank(reading.text, line) >= found.start():
        return True
    is_known = any(tool.name in (found["listed"], found["bare"]) for tool in reading.tools)
    return is_known and not _IN_CODE.search(reading.text, line, found.start())


def _without_list(text: str, found: re.Match[str]) -> Block:
    """A known tool's name that begins a line: a call that wants its list, or a part of prose or of other code."""
    start = found.end() - 1
    end = bracket_end(text, start)
    statement = statement_end(text, found["bare"], start, end)
    if statement is None:
        return Block((), end, is_prose=True)
    return Block((Bad(_NO_LIST),), statement)


def _read_list(text: str, found: re.Match[str], calls: list[Call | Bad]) -> int:
    """Add the calls of a list to `calls`; the place behind its bracket."""
    place = found.end()
    if text[place - 1] != "[":
        raise Malformed(_NO_LIST, place, at_end=is_over(text, place))
    while True:
        place = _behind_blanks(text, place)
        if text.startswith("]", place) and calls:
            return place + 1
        opening = _CALL.match(text, place)
        if not opening:
            raise Malformed("a call must stand in the list", place, at_end=bool(_MAYBE_CALL.match(text, place)))
        end = bracket_end(text, opening.end() - 1)
        calls.append(_call(opening[1], text[opening.end() : end - 1]))
        place = _behind_blanks(text, end)
        if text.startswith(",", place):
            place += 1
        elif not text.startswith("]", place):
            raise Malformed("',' or ']' must follow a call in the list", place, at_end=place == len(text))


def _call(name: str, arguments: str) -> Call | Bad:
    try:
        positional, named = read_arguments(arguments)
    except ValueError as error:
        return Bad(str(error))
    return Bad("every argument needs its name") if positional else Call(name, named)


def _behind_blanks(text: str, start: int) -> int:
    """The place behind blanks and comments."""
    found = _BETWEEN.match(text, start)
    assert found
    return found.end()


PYTHONIC = Grammar(name="pythonic", how_to='[TOOL(name="value", ...)]', opener=_OPENER, read=_read, inner=_INNER)
