"""A model family's hand-written renderer (package `renderers`) as one of ours: behind the guard, and append-only.

What the package knows is kept: the family's prompt, a bridge that never renders the history again, its stop tokens.
Around it stands the guard (`data/family_tokenizer.py`), since the package lets control tokens in contents through.
Left out: which families there are (`data/families.py`), how they are asked (`data/family_package.py`), which one a
model is of (`data/open_renderer.py`), how a turn is written as a policy would sample it (`data/family_samples.py`), and
how the package's reading of one becomes ours (`data/family_turns.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

from data.chat import Thinking
from data.family_messages import Answered
from data.family_package import ASKED, FamilyPackage
from data.family_samples import EXAMPLE, call_form, empty_opening, sampled_turn
from data.family_turns import read_all, read_response
from data.guard import Guard
from data.tool_formats.base import ParsedTurn, ToolFormat
from data.tool_formats.turn import opens_thinking
from data.types import FinishReason, Segment, Source
from envs.types import Message, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FamilyRenderer:
    """A `Renderer` (data/chat.py) of a family that the package `renderers` knows.

    With `thinking="keep"` a stream only grows, whatever the family's template would drop. With `thinking="follow"`,
    `bridge` gives None where that template drops earlier thinking: when a user message comes (DeepSeek-R1: always).

    A token that begins in the template's text and ends in a content is TEMPLATE.

    Args:
        tokenizer: a fast tokenizer with the family's control tokens.
        family: a key of `data.families.FAMILIES`.
        model: what error messages call the model.
        tool_format: reads the calls; None: the package's own parser does.
        enable_thinking: None: the family's default.

    Raises:
        ValueError: the tokenizer lacks the family's tokens, or a key does nothing for this family.
    """

    several_calls: bool

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        family: str,
        *,
        model: str,
        tool_format: ToolFormat | None = None,
        thinking: Thinking = "keep",
        enable_thinking: bool | None = None,
    ) -> None:
        self.name = family
        self._model = model
        self._thinking = thinking
        self._format = tool_format
        self._guard = Guard(tokenizer)
        self.control_tokens = self._guard.control_tokens
        self._package = FamilyPackage(
            tokenizer, self._guard, family, model=model, thinking=thinking, enable_thinking=enable_thinking
        )
        self._traits, self._tokenizer = self._package.traits, self._package.tokenizer
        self.stop_token_ids = self._package.stop_token_ids
        self.several_calls = self._writes_several_calls()
        self._form = call_form(self._package)
        self.differs: str | None = None
        """Where it differs from the model's own chat template."""
        self.description = self._describe()

    def note_difference(self, difference: str | None) -> None:
        """Have the description say where this renderer differs from the model's own chat template."""
        self.differs = difference
        self.description = self._describe()

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        ids = (
            self._package.render(messages, tools, header=True).token_ids
            if messages
            else empty_opening(self._package, tools)
        )
        return [Segment(source=Source.PROMPT, token_ids=tuple(ids))]

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[Segment] | None:
        rows = self._answers(messages, prompt_ids, sampled_ids, tools)
        added = self._package.behind(rows, prompt_ids, sampled_ids, tools)
        if added is None and self._rewrites(messages):
            return None
        if added is None:
            added = self._package.behind_any(rows, sampled_ids, tools)

        def source(pair: tuple[int, bool]) -> Source:
            # No content holds a control token: one that stands beside it is the family's own.
            return Source.TOOL if pair[1] and pair[0] not in self.control_tokens else Source.TEMPLATE

        return [
            Segment(source=one, token_ids=tuple(token for token, _ in run)) for one, run in groupby(added, key=source)
        ]

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        if len(message.tool_calls) > 1 and not self.several_calls:
            raise ValueError(
                f"family {self.name} cannot hold the {len(message.tool_calls)} tool calls of one turn; give each call "
                "a turn of its own"
            )
        return sampled_turn(self._package, message)

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        call_id_prefix: str,
        finish_reason: FinishReason = "stop",
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        body = self._body(token_ids)
        if self._format is None:
            return read_response(
                lambda ids: self._package.read(ids, prompt_ids, tools),
                body,
                self.decode(body),
                form=self._form,
                tools=tools,
                call_id_prefix=call_id_prefix,
                finish_reason=finish_reason,
            )
        return self._format.parse(
            self.decode(body),
            call_id_prefix=call_id_prefix,
            finish_reason=finish_reason,
            tools=tools,
            # A header is the last thing in a prompt; no content can stand where its marker does.
            in_thinking=opens_thinking(self._package.tail(prompt_ids)),
        )

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        return self._format.structural_tag(tools) if self._format else None

    def encode_text(self, text: str) -> list[int]:
        return self._package.encode_text(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def count_forged(self, text: str) -> int:
        return self._guard.count_forged(text)

    def _rewrites(self, messages: Sequence[Message]) -> bool:
        """Whether the family's template, which we are told to follow, drops thinking when these messages come."""
        if self._thinking == "keep" or self._package.template_keeps == "all":
            return False
        return self._package.template_keeps == "template" or any(message.role == "user" for message in messages)

    def _body(self, token_ids: Sequence[int]) -> Sequence[int]:
        """A turn without its stop token."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids

    def _answers(
        self,
        messages: Sequence[Message],
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[dict[str, Any]]:
        """The messages behind a sampled turn, as the package takes them."""
        calls: list[Answered] = []
        if self._package.messages.answers_need_calls(messages):
            body = self._body(sampled_ids)
            with suppress(Exception):  # whatever the package's parser does with what a model wrote
                response, _ = read_all(lambda ids: self._package.read(ids, prompt_ids, tools), body, self._form)
                calls = [Answered(call.name or "", call.id or "") for call in response.tool_calls]
        return self._package.messages.answers(messages, calls)

    # What is found out once, at start-up.

    def _describe(self) -> str:
        """One line for start-up: what writes the ids, what becomes of thinking, what ends a turn, what is guarded."""
        kept = {
            "all": "all thinking stays",
            "tool_cycle": "its template drops earlier thinking when a user message comes",
            "template": "its template drops earlier thinking at every turn",
        }[self._package.template_keeps]
        if self._package.template_keeps != "all":
            kept += ": kept here, streams only grow" if self._thinking == "keep" else ": followed, in a new stream"
        stops = " ".join(self.control_tokens[token] for token in self.stop_token_ids)
        calls = self._format.name if self._format else "its own"
        pinned = "".join(f"; {key} is {value}" for key, value in self._traits.pinned.items())
        differs = f"; it differs from the model's chat template: {self.differs}" if self.differs else ""
        guarded = " ".join(self.control_tokens.values())
        return (
            f"family {self.name}, hand-written; {kept}; turns end with {stops}; calls: {calls}{pinned}; "
            f"{len(self.control_tokens)} control tokens, which no text becomes: {guarded}{differs}"
        )

    def _writes_several_calls(self) -> bool:
        try:
            self._package.render([ASKED, Message(role="assistant", tool_calls=(EXAMPLE, EXAMPLE))], (), header=False)
        except ValueError:
            return False
        return True
