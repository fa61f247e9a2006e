"""Mistral's calls, in the form of its first tokenizers and in that of the later ones.

    [TOOL_CALLS] [{"name": "lookup", "arguments": {"key": "area of Paris"}}, {"name": "now", "arguments": {}}]
    [TOOL_CALLS]lookup[ARGS]{"key": "area of Paris"}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}

`[ARGS]` may be missing, as in the first models of the later form. The call ids that a model invents are not kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from data.tool_formats.json_calls import as_call, json_end, read_json, with_arguments
from data.tool_formats.turn import (
    Bad,
    Block,
    Call,
    Grammar,
    Malformed,
    Reading,
    rest_of_block,
    schema_tag,
    skip_blank,
    tool_tags,
)
from envs.types import ToolSpec

_OPEN = "[TOOL_CALLS]"
_OPENER = re.compile(re.escape(_OPEN))
_NAMED = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")
_LIST = re.compile(r"\[(?!ARGS\]|CALL_ID\])")


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text = reading.text
    calls: list[Call | Bad] = []
    start = skip_blank(text, found.end())
    named = _NAMED.match(text, start)
    try:
        if opening := _LIST.match(text, start):
            end = _read_list(text, opening.end(), calls)
            return Block(tuple(calls), end)
        if not named and not text.startswith("{", start):
            raise Malformed("a name and its arguments must follow", found.end())
        value, end = read_json(text, named.end() if named else start)
        return Block((with_arguments(named[1], value, "[ARGS]") if named else as_call(value),), end)
    except Malformed as error:
        body = named.end() if named else start
        return rest_of_block(reading, error, before=calls, opener=_OPENER, end=partial(json_end, text, body))


def _read_list(text: str, start: int, calls: list[Call | Bad]) -> int:
    """Add the calls of a list to `calls`; the place behind its bracket."""
    place = skip_blank(text, start)
    if text.startswith("]", place):
        raise Malformed("the list of calls is empty", place + 1)
    while True:
        value, end = read_json(text, place)
        calls.append(as_call(value))
        place = skip_blank(text, end)
        if text.startswith("]", place):
            return place + 1
        if not text.startswith(",", place):
            raise Malformed("',' or ']' must follow a call in the list", place)
        place += 1


def _tags(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    listed = [
        schema_tag(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ', tool, "}") for tool in tools
    ]
    calls = {"type": "tags_with_separator", "tags": listed, "separator": ", ", "at_least_one": True}
    named = [schema_tag(f"{_OPEN}{tool.name}[ARGS]", tool, "") for tool in tools]
    lists = [{"type": "tag", "begin": f"{_OPEN}{blank}[", "content": calls, "end": "]"} for blank in ("", " ")]
    return tool_tags(_OPEN, [*named, *lists])


MISTRAL = Grammar(
    name="mistral",
    how_to=f'{_OPEN} [{{"name": "TOOL", "arguments": {{...}}}}] or {_OPEN}TOOL[ARGS]{{...}}',
    opener=_OPENER,
    read=_read,
    inner=re.compile(r"\[ARGS\](?=\s*\{)"),
    tags=_tags,
    thinking=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
)
