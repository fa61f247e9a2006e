"""The contract of a tool-call format: the text of an assistant turn → its thinking, its prose and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from data.types import FinishReason
from envs.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """A call that could not be read, with the line that tells the model how to write it."""

    call_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """An assistant turn as the host sees it.

    content: its prose, without thinking and calls.
    calls: in order, readable or not.
    thinking: what it thought, without markers.
    thinking_open: it ended before its thinking did; then it has neither prose nor calls.
    """

    content: str
    calls: tuple[ToolCall | CallError, ...]
    thinking: str = ""
    thinking_open: bool = False


class ToolFormat(Protocol):
    """Reads one family's way of writing tool calls."""

    name: str

    def parse(
        self,
        text: str,
        *,
        call_id_prefix: str,
        finish_reason: FinishReason,
        tools: Sequence[ToolSpec] = (),
        in_thinking: bool = False,
    ) -> ParsedTurn:
        """Read a turn's text, control tokens kept, its stop token taken off. It never raises for what a model wrote.

        Args:
            call_id_prefix: call ids are `{call_id_prefix}_0`, `_1`, …
            finish_reason: a turn that was cut ("length") may end inside a call; that is no error of the policy's, so
                the unfinished call is neither a call nor a `CallError`.
            tools: their schemas say which type a value has that is written without one (XML).
            in_thinking: the prompt opened the thinking already.
        """
        ...

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        """xgrammar's structural tag (JSON) that holds a call, once begun, to this format and the tools' schemas; None
        where the format has none."""
        ...
