"""What a family's own parser found in a sampled turn, in our terms.

For the families whose calls none of our formats reads: GLM, DeepSeek, Kimi, MiniMax, Gemma, Hunyuan, Laguna, Inkling.
The package keeps every attempt at a call with its status; here it becomes a call, or a line that tells the model how
to write one. The same rules as our formats': an unknown name is a call (the environment answers it), a value that is
not of its type stays as it was written (the schema check answers it), what a cut left unfinished is neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data.tool_formats.base import CallError, ParsedTurn
from data.types import FinishReason
from envs.types import ToolCall

if TYPE_CHECKING:
    from renderers import ParsedResponse, ParsedToolCall

_SURROGATES = re.compile("[\ud800-\udfff]")
_REASONS = {
    "invalid_json": "its arguments are no valid JSON",
    "unclosed_block": "it has no end",
    "missing_name": "it names no tool",
    "malformed_structure": "it is not of the right form",
}


def read_response(
    read: Callable[[], ParsedResponse], text: str, *, call_id_prefix: str, finish_reason: FinishReason, example: str
) -> ParsedTurn:
    """The turn that `read` parses; it never raises for what a model wrote.

    Args:
        text: the turn as text, for when `read` itself fails.
        example: a call as the family writes it.
    """
    try:
        response = read()
    except Exception as error:  # whatever the package's parser does with what a model wrote
        reason = f"it could not be read ({type(error).__name__})"
        return ParsedTurn(content=_clean(text), calls=(_call_error(f"{call_id_prefix}_0", reason, example),))
    thinking = _clean(response.reasoning_content or "").strip()
    if response.reasoning_complete is False:
        return ParsedTurn(content="", calls=(), thinking=thinking, thinking_open=True)
    attempts = list(response.tool_calls)
    calls = [_call(attempt, f"{call_id_prefix}_{index}", example) for index, attempt in enumerate(attempts)]
    if finish_reason == "length" and attempts and attempts[-1].status in ("unclosed_block", "malformed_structure"):
        calls.pop()
    content = _clean(response.content)
    return ParsedTurn(content=content.strip() if attempts else content, calls=tuple(calls), thinking=thinking)


def _call(attempt: ParsedToolCall, call_id: str, example: str) -> ToolCall | CallError:
    reason = _REASONS.get(attempt.status.value)
    if isinstance(attempt.arguments, Mapping) and attempt.status.value == "invalid_json":
        reason = None  # a value that is no JSON of its type, kept as text
    if reason is None and not attempt.name:
        reason = _REASONS["missing_name"]
    if reason is None and not isinstance(attempt.arguments, Mapping):
        reason = "its arguments are no JSON object"
    if reason is None and not _is_finite(attempt.arguments):
        reason = "NaN and Infinity are no JSON numbers"
    if reason is not None:
        return _call_error(call_id, reason, example)
    assert attempt.name is not None
    assert isinstance(attempt.arguments, Mapping)
    arguments = {key: _untrimmed(attempt.raw, key, value) for key, value in attempt.arguments.items()}
    return ToolCall(call_id=call_id, name=_clean(attempt.name), arguments=_clean_all(arguments))


def _untrimmed(raw: str, key: str, value: Any) -> Any:
    """A text as the model wrote it between its tags. The package trims it: the indentation of a line of code, or the
    line break at the end of a file, would be lost."""
    if not isinstance(value, str):
        return value
    written = (
        rf"(?<=[>\s\"']){re.escape(key)}\s*(?:</arg_key[^<>]*>\s*<arg_value[^<>]*>|\">)(\s*{re.escape(value)}\s*)</"
    )
    found = re.search(written, raw)
    return found[1] if found else value


def _call_error(call_id: str, reason: str, example: str) -> CallError:
    return CallError(
        call_id=call_id, text=f"This tool call was not run: {reason}. A call is written like this: {example}"
    )


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list) else True


def _clean(text: str) -> str:
    """Half a surrogate pair is no character; JSON may still spell one."""
    return _SURROGATES.sub("\ufffd", text)


def _clean_all(value: Any) -> Any:
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean_all(item) for key, item in value.items()}
    return [_clean_all(item) for item in value] if isinstance(value, Sequence) else value
