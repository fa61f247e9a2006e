"""Does a renderer write a demonstrated turn so that it is read as it was meant? And what of it does it leave out?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.chat import Renderer
from envs.types import Message, ToolCall, ToolSpec


def check_turn(
    message: Message,
    renderer: Renderer,
    *,
    turn_ids: Sequence[int],
    prompt_ids: Sequence[int],
    tools: Sequence[ToolSpec],
) -> None:
    """Refuse a turn with calls that would teach others than it makes.

    Raises:
        ValueError: a call is not read as it was written.
    """
    if not message.tool_calls:
        return
    read = renderer.parse(turn_ids, call_id_prefix="call", tools=tools, prompt_ids=prompt_ids).calls
    same = len(read) == len(message.tool_calls) and all(map(_same_call, message.tool_calls, read))
    if not same:
        names = ", ".join(dict.fromkeys(call.name for call in message.tool_calls))
        raise ValueError(f"a call that is not read as it was written (of {names})")


def leaves_out(message: Message, renderer: Renderer, field: str) -> bool:
    """Whether a turn has the same ids without its `thinking` or its `content`."""
    if not getattr(message, field).strip():
        return False
    try:
        return renderer.turn_ids(message) == renderer.turn_ids(replace(message, **{field: ""}))
    except ValueError:  # there is no such turn without
        return False


def _same_call(written: ToolCall, read: object) -> bool:
    if not isinstance(read, ToolCall) or read.name != written.name:
        return False
    # Nothing is left out where the schema takes no nothing.
    given = {key: value for key, value in written.arguments.items() if value is not None or key in read.arguments}
    return given.keys() == read.arguments.keys() and all(same(given[key], read.arguments[key]) for key in given)


def same(written: Any, read: Any) -> bool:
    """Whether two values are one; a value that is written without a type may differ in that.

    >>> same([1, "a"], '[1, "a"]'), same(5, 5.0), same(True, 1), same("a", "b")
    (True, True, False, False)
    """
    if isinstance(written, str) != isinstance(read, str):
        text, value = (written, read) if isinstance(written, str) else (read, written)
        return text.strip() == str(value) or _decoded(text) == value
    if isinstance(written, Mapping) and isinstance(read, Mapping):
        return written.keys() == read.keys() and all(same(written[key], read[key]) for key in written)
    if isinstance(written, list | tuple) and isinstance(read, list | tuple):
        return len(written) == len(read) and all(map(same, written, read))
    return isinstance(written, bool) == isinstance(read, bool) and written == read


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
