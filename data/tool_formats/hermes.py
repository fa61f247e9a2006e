"""Hermes blocks, as Qwen2.5 and Qwen3 write them: one JSON object between two tags.

<tool_call>
{"name": "lookup", "arguments": {"key": "area of Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from data.tool_formats.json_calls import as_call, read_json
from data.tool_formats.turn import (
    Block,
    Grammar,
    Malformed,
    Reading,
    behind,
    rest_of_block,
    schema_tag,
    skip_blank,
    tool_tags,
)
from envs.types import ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENER = re.compile(_OPEN)


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text = reading.text
    try:
        value, end = read_json(text, found.end())
        close = skip_blank(text, end)
        if not text.startswith(_CLOSE, close):
            raise Malformed(f"{_CLOSE} must follow the JSON object", end)
    except Malformed as error:
        return rest_of_block(reading, error, opener=_OPENER, end=behind(text, _CLOSE, error.place))
    return Block((as_call(value),), close + len(_CLOSE))


def _tags(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    def begin(tool: ToolSpec) -> str:
        return f'{_OPEN}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '

    return tool_tags(_OPEN, [schema_tag(begin(tool), tool, f"}}\n{_CLOSE}") for tool in tools])


HERMES = Grammar(
    name="hermes",
    how_to=f'{_OPEN}{{"name": "TOOL", "arguments": {{...}}}}{_CLOSE}',
    opener=_OPENER,
    read=_read,
    inner=re.compile(f"(?P<close>{_CLOSE})"),
    tags=_tags,
)
