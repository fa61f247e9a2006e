"""The text form of tool calls: Hermes/Qwen blocks, written and read.

    <tool_call>
    {"name": "lookup", "arguments": {"key": "area of Paris"}}
    </tool_call>

A block that cannot be read becomes a `CallError`, which the model gets as an observation; it is never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from data.jsonl import plain_json
from data.tool_formats.base import CallError, ParsedTurn
from envs.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FORM = '{"name": "TOOL", "arguments": {...}}'


def format_calls(calls: Sequence[ToolCall]) -> list[str]:
    """The pieces of text that make up `calls`; the markers are pieces of their own, so that a tokenizer that
    has them as control tokens can place them by id.

    >>> format_calls([ToolCall(call_id="1", name="f", arguments={})])
    ['<tool_call>', '\\n{"name": "f", "arguments": {}}\\n', '</tool_call>']
    """
    pieces: list[str] = []
    for call in calls:
        body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        pieces += ["\n"] if pieces else []
        pieces += [OPEN, f"\n{body}\n", CLOSE]
    return pieces


def parse_turn(text: str, *, call_id_prefix: str) -> ParsedTurn:
    """Read the calls out of a turn's text. The JSON is read by a JSON reader, so a marker inside a string of the
    arguments does not end the block. Call ids are `{call_id_prefix}_0`, `_1`, …

    >>> turn = parse_turn('Hm.\\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', call_id_prefix="c")
    >>> turn.content, turn.calls[0].name, turn.calls[0].arguments
    ('Hm.', 'f', {'x': 1})
    """
    prose: list[str] = []
    calls: list[ToolCall | CallError] = []
    place = 0
    while (start := text.find(OPEN, place)) >= 0:
        prose.append(text[place:start])
        call, place = _read_block(text, start + len(OPEN), f"{call_id_prefix}_{len(calls)}")
        calls.append(call)
    prose.append(text[place:])
    return ParsedTurn(content="".join(prose).strip(), calls=tuple(calls))


def _read_block(text: str, start: int, call_id: str) -> tuple[ToolCall | CallError, int]:
    """The call of the block whose body begins at `start`, and the place after the block."""
    body = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, body)
        value = plain_json(value)
    except (ValueError, RecursionError) as error:
        return CallError(call_id=call_id, text=_malformed(_reason(error))), _block_end(text, start)
    after = _block_end(text, end)
    if text[end:after].strip() != CLOSE:
        return CallError(call_id=call_id, text=_malformed(f"{CLOSE} must follow the JSON object")), after
    return _checked(value, call_id), after


def _block_end(text: str, start: int) -> int:
    """The place after the next closing marker, but not beyond the next opening one: that begins a call of its own."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start)
    end = len(text) if close < 0 else close + len(CLOSE)
    return min(end, following) if following >= 0 else end


def _checked(value: Any, call_id: str) -> ToolCall | CallError:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return CallError(call_id=call_id, text=_malformed("'name' must be a string"))
    others = value.keys() - {"name", "arguments"}
    if "arguments" not in value and others:
        # What stands under another key may be the arguments; a call without them would be another call.
        return CallError(call_id=call_id, text=_malformed(f"unknown key {min(others)!r}"))
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return CallError(call_id=call_id, text=_malformed("'arguments' must be an object"))
    return ToolCall(call_id=call_id, name=value["name"], arguments=arguments)


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # Python's own words about a number of thousands of digits name a setting of the host.
    return "a number is too long" if "digits" in str(error) else str(error)


def _malformed(reason: str) -> str:
    return f"error: malformed tool call: {reason}; write {_FORM}"
