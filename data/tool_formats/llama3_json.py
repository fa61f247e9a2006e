"""Llama 3's calls: JSON objects, bare or behind `<|python_tag|>`, in a row or with prose around.

    {"name": "lookup", "parameters": {"key": "area of Paris"}}; {"name": "now", "parameters": {}}

There is no marker, so an object is a call when it can be nothing else: it has a name and arguments (`arguments` is
understood too, as vLLM does), or it names a known tool, or the tag stands before it, or it is the whole turn and has
nothing but a name. One that is not of the right form is a broken call where it asks for a known tool (`asked`). Other
objects are prose, also one that describes a tool, and so is a fence that shows code (`fences`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from data.tool_formats.asked import asked_for, asked_for_in, describes_tool
from data.tool_formats.fences import FENCE, NOT_QUOTED, code_end
from data.tool_formats.json_calls import as_call, json_end, read_json
from data.tool_formats.turn import (
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

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_ENVELOPE = {"name", "id", "call_id", "type", *_KEYS}
_HEAD = re.compile(r'\{\s*"name"\s*:')
_OBJECT = rf'{NOT_QUOTED}\{{(?=\s*["}}])'
_IS_OBJECT = re.compile(_OBJECT)
_NEXT = re.compile(f"{_HEAD.pattern}|{re.escape(_TAG)}")
_OPENER = re.compile(rf"{FENCE}|(?P<tag>{re.escape(_TAG)})|{_OBJECT}", re.MULTILINE)
_END_OF_FENCE, _SEPARATOR = re.compile(r"\s*```"), re.compile(r"\s*;")


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text = reading.text
    fenced = bool(found["fence"])
    if (fenced or found["inline"]) and (end := code_end(text, found, was_cut=reading.was_cut)):
        return Block((), end, is_prose=True)
    if fenced and not _IS_OBJECT.match(text, found.end()):
        return Block((), found.end(), is_prose=True)
    start = skip_blank(text, found.end()) if found["tag"] else found.end() - (not fenced)
    try:
        value, end = read_json(text, start)
    except Malformed as error:
        return _broken(reading, start, error, tagged=bool(found["tag"]))
    more = (_END_OF_FENCE if fenced else _SEPARATOR).match(text, end)
    behind = more.end() if more else end
    is_whole = not text[: found.start()].strip() and not text[behind:].strip()
    if not found["tag"] and not _is_call(value, reading.tools, is_whole=is_whole):
        return Block((), end, is_prose=True)
    return Block((as_call(value, _KEYS),), behind)


def _is_call(value: dict[str, Any], tools: Sequence[ToolSpec], *, is_whole: bool) -> bool:
    """Whether an object is a call, which may be all of a turn."""
    if describes_tool(value):
        return False
    if tools and is_whole and isinstance(value.get("name"), str) and value.keys() <= _ENVELOPE - {*_KEYS}:
        return True
    has_arguments = any(key in value for key in _KEYS)
    if not tools:
        return has_arguments and ("name" in value or value.keys() <= _ENVELOPE)
    if isinstance(as_call(value, _KEYS), Call):
        return has_arguments or any(tool.name == value["name"] for tool in tools)
    return "name" in value and asked_for(value, tools) is not None


def _broken(reading: Reading, start: int, error: Malformed, *, tagged: bool) -> Block:
    """What cannot be read: a call where it asks for a tool, else prose up to where it went wrong."""
    text = reading.text
    begins = tagged or bool(_HEAD.match(text, start))
    if begins or any(text.find(tool.name, start) >= 0 for tool in reading.tools):
        block = rest_of_block(reading, error, opener=_NEXT, end=partial(json_end, text, start))
        if tagged or _asks(reading, text[start : block.end], begins and error.at_end):
            return block
    return Block((), max(error.place, start + 1), is_prose=True)


def _asks(reading: Reading, text: str, is_open: bool) -> bool:
    """Whether broken JSON is a call. Without tools a name and arguments are enough, or a name where it breaks off."""
    if reading.was_cut and is_open:
        return True
    if not reading.tools:
        return bool(_HEAD.match(text)) and (is_open or any(f'"{key}"' in text for key in _KEYS))
    return asked_for_in(text, reading.tools) is not None


def _tags(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    def begin(tool: ToolSpec) -> str:
        return f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": '

    return tool_tags('{"name": ', [schema_tag(begin(tool), tool, "}") for tool in tools])


LLAMA3_JSON = Grammar(
    name="llama3_json",
    how_to='{"name": "TOOL", "parameters": {...}}',
    opener=_OPENER,
    read=_read,
    tags=_tags,
    is_bare_json=True,
)
