"""The contract of a tool-call format: the text of an assistant turn → its thinking, its prose and its calls.

One rule book for all formats. The same rules read a rollout, check a demonstration and score a reward.

Whole or nothing
    A call is a `ToolCall` when it is written exactly as the format says; else it is a `CallError`, the line that the
    model reads as that call's result. No text raises, no call is dropped, order is kept, and a broken call takes no
    other with it. Nothing is repaired: a policy that is trained learns the form that others will read. After 16 calls
    that cannot be read the rest of the turn is left, and the last error says so.
Names and schemas
    Any string is a name. Whether the tool exists and the arguments fit its schema is the environment's to answer
    (`envs.tools.call_error`); it is no matter of the form.
Arguments
    An object. Missing: `{}`. `null`, a list, or an object written as a JSON string: a `CallError`. So is a key that
    stands twice, one that the format does not know, a number that is not finite or has thousands of digits, and what
    is nested more than 64 deep. Half a surrogate pair becomes U+FFFD. The same call twice is two calls.
    Where the schema says integer and not number, a number without a fraction is that integer, however it is written:
    `5.0` is 5. Where values are written without types, `values` says what the schema makes of them, also of nothing.
Markers inside values
    A marker, bracket, quote or fence inside a string ends nothing.
Markers outside of calls
    What stands inside calls alone (an argument's tag, a closing marker), and stands outside of any, shows a call whose
    opener is missing: a `CallError`, unless code only quotes it. A closing marker that is doubled says nothing.
Thinking
    Between its markers, or from the turn's start where the prompt opened it. It ends at its closing marker alone: what
    looks like a call before that is something the model considered. (vLLM lets Qwen's `<tool_call>` end thinking; a
    call that was only weighed must not be run.) Where it never ends, the turn is `thinking_open`. What stands behind it
    begins a line.
Cut turns
    After the finish reason "length", calls that were whole before the cut stay, and the one that was cut is neither a
    call nor an error; its text is left out.
Other forms
    A turn without a call in the own format, that writes one in another, is answered with a `CallError` too; else a
    drift of the form would pass for a final answer. It must name a known tool; JSON may name any where no tools are
    given. Other forms are the other formats' own, and what `other_forms` knows: an object of JSON's or Python's with a
    name and arguments, under any of the keys that are usual and in a fence of any label, whether or not it can be read;
    a name behind another family's markers or behind `Action:`; a call in Python's syntax, its values literals, alone on
    its line.
    All else is prose: a tool that is mentioned, with or without its arguments, inside a sentence or inline code; a call
    that the code in a fence only quotes (`fences`); a function that the text itself defines or imports; an object that
    describes a tool, or holds its name under another key.
"""

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
    thinking_open: it ended inside its thinking; only what stood before that is prose or a call.
    """

    content: str
    calls: tuple[ToolCall | CallError, ...]
    thinking: str = ""
    thinking_open: bool = False


class ToolFormat(Protocol):
    """Reads one family's way of writing tool calls."""

    @property
    def name(self) -> str: ...

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
            tools: their schemas say which type a value has that is written without one (XML), and what is an integer.
            in_thinking: the prompt opened the thinking already.
        """
        ...

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        """xgrammar's structural tag (JSON) that holds a call, once begun, to this format and the tools' schemas; None
        where the format has none."""
        ...
