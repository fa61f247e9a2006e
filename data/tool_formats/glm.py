"""GLM's XML, from 4.5 on: the tool's name behind the opening tag, then a pair of tags for each argument.

    <tool_call>post
    <arg_key>zip</arg_key>
    <arg_value>02134</arg_value>
    </tool_call>

Later models leave the line breaks out. A text stands as it is, anything else as JSON; `values.typed` says which type a
value has. Nothing is escaped, so a value ends at the first `</arg_value>` behind which the structure goes on, and all
between its tags belongs to it. A text that holds another tag of arguments than its own end is refused: it may have
swallowed the next argument. A name is one line without `<` and `{`: tags and JSON in its place are calls of other
formats. A key is one line without `<`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from data.tool_formats.json_calls import value_end
from data.tool_formats.turn import (
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
_KEY, _VALUE, _END = "<arg_key>", "<arg_value>", "</arg_value>"
_OPENER = re.compile(_OPEN)
_NAME = re.compile(r"\s*([^<{\n]*[^<{\s])\s*")
_PAIR = re.compile(rf"{_KEY}([^<\n]*)</arg_key>\s*{_VALUE}")
_STRUCTURAL_END = re.compile(rf"{_END}(?=\s*(?:{_KEY}|{_CLOSE}))")
_TAG = re.compile(r"</?arg_key\b|<arg_value\b")
_JSON = {"array", "object", "null"}
# What stands outside values. A call that begins in one is quoted; one that ends there shows that it was never closed.
_OUTSIDE = re.compile(
    rf"(?P<value>{_VALUE}(?:(?!{_OPEN}|{_CLOSE}|{_VALUE}).)*?(?:{_OPEN}.*?)?{_STRUCTURAL_END.pattern})|{_OPEN}|{_CLOSE}",
    re.DOTALL,
)


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text = reading.text
    try:
        call, end = _read_call(text, found.end(), reading.tools)
    except Malformed as error:
        error = beyond_values(text, error, _OUTSIDE)
        return rest_of_block(reading, error, opener=_OPENER, end=behind(text, _CLOSE, error.place))
    return Block((call,), end)


def _read_call(text: str, start: int, tools: Sequence[ToolSpec]) -> tuple[Call, int]:
    named = _NAME.match(text, start)
    if not named:
        raise Malformed(f"the tool's name must come first, not {shown(text[start : start + 99])}", start)
    tool = next((tool for tool in tools if tool.name == named[1]), None)
    arguments: dict[str, Any] = {}
    place = named.end()
    while not text.startswith(_CLOSE, place):
        key, value, place = _read_argument(text, place, tool)
        if key in arguments:
            raise Malformed(f"the argument {shown(key)} stands twice", place)
        arguments[key] = typed(value, tool, key)
        place = skip_blank(text, place)
    return Call(named[1], {key: value for key, value in arguments.items() if value is not NotGiven}), place + len(
        _CLOSE
    )


def _read_argument(text: str, start: int, tool: ToolSpec | None) -> tuple[str, str, int]:
    """The argument at `start`, its text, and the place behind it."""
    opening = _PAIR.match(text, start)
    if not opening:
        reason = f"{_KEY}NAME</arg_key>{_VALUE} or {_CLOSE} must stand where {shown(text[start : start + 99])} does"
        raise Malformed(reason, start, at_end=start == len(text))
    key, begin = opening[1], opening.end()
    types = types_of(tool, key)
    inside = value_end(text, begin) if types and types <= _JSON else begin
    end = _STRUCTURAL_END.search(text, inside)
    following = _PAIR.search(text, inside, end.start()) if end else None
    if end and (inner := _TAG.search(text, inside, end.start())) and not following:
        raise Malformed(f"the value of {shown(key)} holds {shown(inner[0])}; write it in other words", end.end())
    if end and not following:
        return key, text[begin : end.start()], end.end()
    opener = _OPENER.search(text, inside, following.start() if following else len(text))
    if opener and text.find(_CLOSE, inside, opener.start()) < 0:
        # The value quotes a call. Where it ends cannot be told, and nothing that it quotes may run.
        place = max(opener.end(), text.rfind(_CLOSE))
        reason = f"the value of {shown(key)} holds a tool call; write it in other words"
        raise Malformed(reason, place, at_end=not end)
    raise Malformed(f"{_END} must follow the value of {shown(key)}", inside, at_end=not end)


def _tags(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    return tool_tags(_OPEN, [schema_tag(f"{_OPEN}{tool.name}", tool, _CLOSE, "glm_xml") for tool in tools])


GLM = Grammar(
    name="glm",
    how_to=f"{_OPEN}TOOL{_KEY}NAME</arg_key>{_VALUE}VALUE{_END}{_CLOSE}",
    opener=_OPENER,
    read=_read,
    inner=re.compile(rf"(?P<close>{_CLOSE})|{_KEY}|{_VALUE}"),
    tags=_tags,
)
