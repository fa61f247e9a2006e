"""Qwen3-Coder's XML, which Qwen3.5 and Nemotron 3 write too: a tag for the function, one for each parameter.

    <tool_call>
    <function=post>
    <parameter=zip>
    02134
    </parameter>
    </function>
    </tool_call>

Values are plain text; `values.typed` says which type they have. Nothing in them is escaped, so a value ends at the
first `</parameter>` behind which the structure goes on, and one line break at either end belongs to the tags. A text
cannot hold what would be structure in its own place: `</parameter>` before another tag, or a line that begins with
`<parameter=`; nor `</parameter>` before a line with any tag, unless it opened that itself: it may have swallowed the
next parameter. The function's tags may stand alone, and several in one `<tool_call>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data.tool_formats.json_calls import value_end
from data.tool_formats.turn import (
    Bad,
    Block,
    Call,
    Grammar,
    Malformed,
    Reading,
    behind,
    beyond_values,
    rest_of_block,
    schema_tag,
    shown,
    skip_blank,
    tool_tags,
)
from data.tool_formats.values import NotGiven, typed, types_of
from envs.types import ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEGIN = "<function="
_OPENER = re.compile(f"{_OPEN}|{_BEGIN}")
_FUNCTION = re.compile(r"<function=([^>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>")
_JSON = {"array", "object", "null"}
_END, _FUNCTION_END = "</parameter>", "</function>"
_STRUCTURAL_END = re.compile(rf"{_END}(?=\s*(?:<parameter=|{_FUNCTION_END}|{_CLOSE}))")
# What stands outside values. A call that begins in one is quoted; one that ends there shows that it was never closed.
_MARKER = f"{_OPEN}|{_CLOSE}|{_BEGIN}|{_FUNCTION_END}"
_OUTSIDE = re.compile(
    rf"(?P<value>{_PARAMETER.pattern}(?:(?!{_MARKER}|<parameter=).)*?(?:(?:{_OPENER.pattern}).*?)?"
    rf"{_STRUCTURAL_END.pattern})|{_MARKER}",
    re.DOTALL,
)
_INNER = re.compile(rf"<parameter\b|(?P<end>{_END})(?P<goes_on>(?=\s*\n\s*</?\w))?")
_NEVER_CLOSED = re.compile(rf"\n[ \t]*<parameter=|{_FUNCTION_END}\s*{_CLOSE}")


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text, wrapped = reading.text, found[0] == _OPEN
    calls: list[Call | Bad] = []
    place = found.end() if wrapped else found.start()
    try:
        while True:
            call, place = _read_function(text, place, reading.tools)
            following = skip_blank(text, place)
            if not wrapped:
                return Block((call,), place)
            if text.startswith(_CLOSE, following):
                return Block((*calls, call), following + len(_CLOSE))
            if not text.startswith(_BEGIN, following):
                raise Malformed(f"{_CLOSE} must follow {_FUNCTION_END}", place)
            calls.append(call)
            place = following
    except Malformed as error:
        error = beyond_values(text, error, _OUTSIDE)
        end = behind(text, _CLOSE if wrapped else _FUNCTION_END, error.place)
        return rest_of_block(reading, error, before=calls, opener=_OPENER, end=end)


def _read_function(text: str, start: int, tools: Sequence[ToolSpec]) -> tuple[Call, int]:
    start = skip_blank(text, start)
    opening = _FUNCTION.match(text, start)
    if not opening:
        begun = len(_BEGIN) if text.startswith(_BEGIN, start) else 0
        raise Malformed(f"<function=TOOL> must come first, not {shown(text[start : start + 99])}", start + begun)
    tool = next((tool for tool in tools if tool.name == opening[1]), None)
    arguments: dict[str, Any] = {}
    place = skip_blank(text, opening.end())
    while not text.startswith(_FUNCTION_END, place):
        parameter, value, place = _read_parameter(text, place, tool)
        if parameter in arguments:
            raise Malformed(f"the parameter {shown(parameter)} stands twice", place)
        arguments[parameter] = typed(value, tool, parameter)
        place = skip_blank(text, place)
    given = {parameter: value for parameter, value in arguments.items() if value is not NotGiven}
    return Call(opening[1], given), place + len(_FUNCTION_END)


def _read_parameter(text: str, start: int, tool: ToolSpec | None) -> tuple[str, str, int]:
    """The parameter at `start`, its text, and the place behind it."""
    opening = _PARAMETER.match(text, start)
    if not opening:
        reason = f"<parameter=NAME> or {_FUNCTION_END} must stand where {shown(text[start : start + 99])} does"
        raise Malformed(reason, start, at_end=start == len(text))
    name, begin = opening[1], opening.end()
    types = types_of(tool, name)
    inside = value_end(text, begin) if types and types <= _JSON else begin
    end = _STRUCTURAL_END.search(text, inside)
    unclosed = _NEVER_CLOSED.search(text, inside, end.start()) if end else None
    quoted = _OPENER.search(text, inside, unclosed.start()) if unclosed else None
    if quoted:
        # The value quotes a call. Where it ends cannot be told, and nothing that it quotes may run.
        reason = f"the value of {shown(name)} holds a tool call; write it in other words"
        raise Malformed(reason, max(quoted.end(), text.rfind(_CLOSE)))
    if end and not unclosed and _has_end(text, inside, end.start()):
        reason = f"the value of {shown(name)} holds {_END} before another tag; write it in other words"
        raise Malformed(reason, end.end())
    if end and not unclosed:
        return name, text[begin : end.start()].removeprefix("\n").removesuffix("\n"), end.end()
    close = text.find(_END, inside)
    if end or close < 0:
        raise Malformed(f"{_END} must follow the value of {shown(name)}", inside, at_end=not end)
    raise Malformed(f"{_FUNCTION_END} must follow the parameters", close + len(_END), at_end=True)


def _has_end(text: str, start: int, end: int) -> bool:
    """Whether a value goes on behind its end: a tag that it did not open itself, before a line with another."""
    opened = 0
    for found in _INNER.finditer(text, start, end):
        if found["end"] and found["goes_on"] is not None and not opened:
            return True
        opened = max(0, opened - 1) if found["end"] else opened + 1
    return False


def _tags(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    end = f"{_FUNCTION_END}\n{_CLOSE}"  # the schema takes the line breaks before it
    return tool_tags(_OPEN, [schema_tag(f"{_OPEN}\n<function={tool.name}>\n", tool, end, "qwen_xml") for tool in tools])


QWEN3_CODER = Grammar(
    name="qwen3_coder",
    how_to=f"{_OPEN}<function=TOOL><parameter=NAME>VALUE{_END}{_FUNCTION_END}{_CLOSE}",
    opener=_OPENER,
    read=_read,
    inner=re.compile(rf"(?P<close>{_CLOSE})|^[ \t]*<parameter=[^>\n]*>", re.MULTILINE),
    tags=_tags,
)
