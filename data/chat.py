"""The seam between chat and tokens: what a renderer does, whatever the model family.

`TemplateRenderer` (`data/template_renderer.py`) serves any Jinja chat template, `FamilyRenderer`
(`data/family_renderer.py`) the families with a hand-written renderer, `ReactRenderer` (`data/react.py`) models without
tools of their own. All of them keep two promises. No content becomes a control token, whatever it says
(`data/guard.py`). And the ids of a history are never made again: a bridge is appended to what was sampled, or a new
stream starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from data.tool_formats.base import ParsedTurn
from data.types import FinishReason, Segment
from envs.types import Message, ToolSpec

Thinking = Literal["keep", "follow"]
"""What becomes of thinking when a user message comes: it is kept, or dropped where the template drops it (`follow`)."""


class Renderer(Protocol):
    """One seam for every model family."""

    name: str
    """What wrote the ids: `template`, or the family."""
    stop_token_ids: tuple[int, ...]
    """What a policy ends its turns with; the first one ends an ordinary turn."""
    control_tokens: Mapping[int, str]
    several_calls: bool
    """Whether one assistant turn may hold more than one tool call."""
    description: str
    """One line for start-up: what renders, what ends turns, what becomes of thinking, which tokens no text becomes."""

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        """The prompt (PROMPT), up to and with the header of the assistant turn to be sampled. `messages` may hold
        assistant turns (a history that was rewritten): they are context, and never trained.

        Raises:
            ValueError: the template cannot write them.
        """
        ...

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[Segment] | None:
        """What stands between a sampled turn and the next one: the template's text (TEMPLATE) around the contents of
        `messages` (TOOL), up to and with the next assistant header. A turn that did not end with a stop token gets its
        closing token here.

        None: with these messages the template rewrites what came before (it drops earlier thinking), and the renderer
        was told to follow it. Then a new stream starts with `opening` of the whole conversation.

        Args:
            messages: tool and user messages.
            prompt_ids: the stream up to the sampled turn.
            sampled_ids: the turn.
        """
        ...

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        """A demonstration's assistant turn as a policy would sample it, the stop token included.

        Raises:
            ValueError: the turn has more calls than the template can write.
        """
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        call_id_prefix: str,
        finish_reason: FinishReason = "stop",
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        """What a sampled turn says. `prompt_ids` (the stream before it) tells whether its thinking was opened there."""
        ...

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        """What holds a call to the tools' schemas while it is sampled; see `ToolFormat.structural_tag`."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text as it would stand in a content: to count and to cut its tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens kept."""
        ...

    def count_forged(self, text: str) -> int:
        """How many control tokens `text` spells; they are encoded as plain text, and counted."""
        ...
