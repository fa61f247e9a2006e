"""One call of a tool: its deadline, and its result as the text that a model reads."""

from __future__ import annotations

import asyncio
import json
import reprlib
from dataclasses import replace

from data.jsonl import plain_json
from envs.base import Session
from envs.types import ToolCall, ToolResult


async def call_tool(session: Session, call: ToolCall, *, timeout_s: float) -> ToolResult:
    """The result of one call, its content as text. The tool runs on the event loop's thread and has a deadline; it
    cannot be kept while a session blocks that thread.

    Raises:
        RuntimeError: the tool asked this process to exit.
        SandboxError: the sandbox failed.
    """
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            result = await session.call(call)
    except SystemExit as error:
        # It must not reach the edge of this task: asyncio would end the whole loop with it.
        raise RuntimeError(f"the tool {call.name} asked this process to exit") from error
    except TimeoutError:
        if not clock.expired():  # the tool's own: a failure like any other
            raise
        text = f"error: {call.name} gave no result within {timeout_s:g} s"
        return ToolResult(call_id=call.call_id, content=text, is_error=True, duration_s=timeout_s)
    return replace(result, content=as_text(result.content))


def as_text(content: object) -> str:
    """What a tool returned, as a model can read it and a file can hold it; text stays as it is.

    >>> as_text({"ok": True})
    '{"ok": true}'
    """
    if isinstance(content, str):
        return plain_json(content)
    try:
        return plain_json(json.dumps(content, ensure_ascii=False, default=str))
    except (TypeError, ValueError, RecursionError):  # keys that JSON has not, or a value that holds itself
        return plain_json(reprlib.repr(content))
