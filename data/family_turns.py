"""What a family's own parser found in a sampled turn, in our terms.

For the families whose calls none of our formats reads: DeepSeek, Kimi, MiniMax, Hunyuan, Laguna, Inkling. The package
keeps every attempt at a call with its status; `data/family_calls.py` makes a call or an error of each. Here is what
concerns the whole turn. The same rules as our formats': an unknown name is a call (the environment answers it), what a
cut left unfinished is neither, and no call is dropped: calls in a second section are read too, and one that the package
does not see, or that is written in another form, is answered with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from data.families import Writing
from data.family_calls import bodies, call_error, read_call
from data.jsonl import plain_json
from data.tool_formats.base import ParsedTurn
from data.tool_formats.detect import GRAMMARS
from data.tool_formats.turn import Bad, calls_elsewhere
from data.types import FinishReason
from envs.types import ToolSpec

if TYPE_CHECKING:
    from renderers import ParsedResponse, ParsedToolCall

_LEFT_OUT = "it is not of the right form, or stands where no call is read"
_MAX_SWALLOWED = 16
"""Calls without an end that are taken apart: a model that repeats itself fills no context with errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a family writes its calls.

    example: one, for a model that wrote it in another way.
    opener: the control token with which each begins, and which stands nowhere else.
    inner: the control tokens that stand in calls alone, the opener among them.
    around: control tokens that enclose them all.
    ends_thinking, opens_thinking: the control tokens that do so.
    """

    writing: Writing
    example: str
    opener: int | None = None
    inner: frozenset[int] = frozenset()
    around: frozenset[int] = frozenset()
    ends_thinking: frozenset[int] = frozenset()
    opens_thinking: frozenset[int] = frozenset()


def read_response(
    read: Callable[[Sequence[int]], ParsedResponse],
    token_ids: Sequence[int],
    text: str,
    *,
    form: CallForm,
    tools: Sequence[ToolSpec],
    call_id_prefix: str,
    finish_reason: FinishReason,
) -> ParsedTurn:
    """The turn that `read` parses; it never raises for what a model wrote.

    Args:
        token_ids: the turn without its stop token.
        text: the same as text, for when `read` itself fails.
    """
    try:
        response, left_out = read_all(read, token_ids, form)
    except Exception as error:  # whatever the package's parser does with what a model wrote
        reason = f"it could not be read ({type(error).__name__})"
        return ParsedTurn(content=plain_json(text), calls=(call_error(f"{call_id_prefix}_0", reason, form.example),))
    thinking = plain_json(response.reasoning_content or "").strip()
    if response.reasoning_complete is False:
        return ParsedTurn(content="", calls=(), thinking=thinking, thinking_open=True)
    attempts, was_cut = list(response.tool_calls), finish_reason == "length"
    texts, reasons = bodies(attempts, form.writing)
    calls = [
        read_call(
            attempt,
            body,
            writing=form.writing,
            tools=tools,
            call_id=f"{call_id_prefix}_{index}",
            example=form.example,
        )
        for index, (attempt, body) in enumerate(zip(attempts, texts, strict=True))
    ]
    content = plain_json(response.content)
    if was_cut and attempts and attempts[-1].status in ("unclosed_block", "malformed_structure"):
        calls.pop()
    elif not was_cut:
        reasons += [_LEFT_OUT] * left_out
        if not attempts and not reasons:
            reasons = [bad.reason for bad in calls_elsewhere(content, GRAMMARS, tools) if isinstance(bad, Bad)]
    calls += [
        call_error(f"{call_id_prefix}_{number}", reason, form.example)
        for number, reason in enumerate(reasons, start=len(calls))
    ]
    return ParsedTurn(content=content.strip() if attempts or calls else content, calls=tuple(calls), thinking=thinking)


def read_all(
    read: Callable[[Sequence[int]], ParsedResponse], token_ids: Sequence[int], form: CallForm
) -> tuple[ParsedResponse, int]:
    """What the package reads in all sections of calls, and how many calls it left out."""
    response = read(token_ids)
    if response.reasoning_complete is False or not (form.inner | form.around).intersection(token_ids):
        return response, 0
    end = _end_of(response.tool_calls)
    rest = token_ids[end:]
    # The package reads one section: the calls of a later one become calls of the first.
    if end and form.opener in rest and not form.opens_thinking.intersection(rest):
        token_ids = [*token_ids[:end], *(token for token in rest if token not in form.around)]
        response = read(token_ids)
    # A call without an end is read together with those behind it: the last of them has the end, and is read alone.
    swallowed = _swallowed(token_ids, response.tool_calls, form.opener)
    if swallowed:
        taken = {place for places in swallowed for place in places}
        token_ids = [token for place, token in enumerate(token_ids) if place not in taken]
        response = read(token_ids)
    thought = [place for place, token in enumerate(token_ids) if token in form.ends_thinking]
    if response.reasoning_content and not thought:
        return response, len(swallowed)  # it cannot be told where the thinking ended
    spans = [call.token_span for call in response.tool_calls]
    begin = min((start for start, _ in filter(None, spans)), default=len(token_ids))
    begin = max((place for place in thought if place < begin), default=0)
    read_places = {place for span in spans if span for place in range(*span)}
    # Where no call was read at all, an empty or broken section is one that was meant.
    marks = form.inner if response.tool_calls else form.inner | form.around
    marked = (place for place, token in enumerate(token_ids) if token in marks)
    # A mark right behind a call only doubles its end.
    outside = any(place >= begin and {place, place - 1}.isdisjoint(read_places) for place in marked)
    return response, len(swallowed) + outside


def _swallowed(token_ids: Sequence[int], calls: Sequence[ParsedToolCall], opener: int | None) -> list[range]:
    """The places of the calls that were read as a part of one with a later call; the first few of them."""
    found: list[range] = []
    for start, end in sorted({call.token_span for call in calls if call.token_span}):
        begins = [place for place in range(start, end) if token_ids[place] == opener]
        found += [range(*pair) for pair in pairwise(begins[-_MAX_SWALLOWED:])]
    return found


def _end_of(calls: Sequence[ParsedToolCall]) -> int:
    """The place behind the last call; 0 where there is none, or its place is not known."""
    spans = [call.token_span for call in calls]
    return max((end for _, end in filter(None, spans)), default=0)
