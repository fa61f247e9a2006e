"""A family's renderer of the package `renderers`: what goes in, protected, and what comes out.

Left out: what the streams are made of (`data/family_renderer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data.chat import Thinking
from data.families import family_traits
from data.family_messages import FamilyMessages
from data.family_tokenizer import FamilyTokenizer
from data.guard import Guard
from envs.types import Message, ToolSpec

if TYPE_CHECKING:
    from renderers import ParsedResponse, RenderedTokens
    from transformers import PreTrainedTokenizerBase


ASKED = Message(role="user", content=".")
# So much of a stream is enough to see how its last turn was opened; a long one is not copied at every turn.
_TAIL = 64


class FamilyPackage:
    """The package's renderer of one family, behind the guard.

    Args:
        tokenizer: a fast tokenizer with the family's control tokens.
        thinking: `keep`: it is told to drop none.

    Raises:
        ValueError: the tokenizer lacks the family's tokens, or the family has no switch for thinking.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        guard: Guard,
        family: str,
        *,
        model: str,
        thinking: Thinking,
        enable_thinking: bool | None,
    ) -> None:
        self.name = family
        self.traits = family_traits(family)
        self.tokenizer = FamilyTokenizer(tokenizer, guard)
        self.control_tokens: Mapping[int, str] = guard.control_tokens
        self.messages = FamilyMessages(self.tokenizer, self.traits)
        self._model = model
        options: dict[str, Any] = {}
        if enable_thinking is not None:
            if self.traits.switch is None:
                raise ValueError(f"family {family} has no switch for thinking; take enable_thinking out")
            options[self.traits.switch] = enable_thinking
        self._renderer: Any = self._open(options)
        self.template_keeps: str = self._renderer.effective_thinking_retention
        if thinking == "keep":
            self._renderer = self._open(options | {"thinking_retention": "all"})
        self.stop_token_ids = self._stop_tokens()
        """The family's stop tokens, the one first that ends an ordinary turn."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, header: bool) -> RenderedTokens:
        """A whole conversation, with the header of the next turn or without."""
        try:
            return self._renderer.render(
                self.messages.rows(messages), tools=self._specs(tools), add_generation_prompt=header
            )
        except (ValueError, TypeError, KeyError, AssertionError, IndexError) as error:
            roles = ", ".join(message.role for message in messages) or "no messages"
            raise ValueError(
                f"model {self._model}: family {self.name} cannot write a conversation of {roles}: {_one_line(error)}"
            ) from error

    def read(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedResponse:
        """A sampled turn as the package's own parser takes it, which may fail in any way."""
        specs = [tool.as_openai() for tool in tools]
        return self._renderer.parse_response(
            list(token_ids), tools=specs or None, prompt_ids=list(prompt_ids[-_TAIL:]) or None
        )

    def behind(
        self, rows: list[Any], prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> list[tuple[int, bool]] | None:
        """The ids behind a turn, each with whether it holds content; None where the package goes on from no such turn,
        or would have to render it again."""
        if not sampled_ids:
            return None
        # A stop token inside a turn (of a stop list other than ours) ends nothing.
        body = [token for token in sampled_ids[:-1] if token not in self.stop_token_ids] + list(sampled_ids[-1:])
        ended = self.traits.forgets_separator and body[-1] == self.stop_token_ids[0] and len(body) > 1
        body = body[:-1] if ended else body
        known = [*prompt_ids[-_TAIL:], *body]
        rendered = self._renderer.bridge_to_next_turn(known[: -len(body)], body, rows, tools=self._specs(tools))
        if rendered is None:
            return None
        assert rendered.token_ids[: len(known)] == known, f"family {self.name} rewrote a sampled turn"
        return list(zip(rendered.token_ids, rendered.is_content, strict=True))[len(known) + ended :]

    def behind_any(
        self, rows: list[Any], sampled_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> list[tuple[int, bool]]:
        """The same for a turn that the family's templates could not have written: one whose thinking has no end, a
        result that answers no call. What comes next does not depend on what the turn says, so it is taken from behind
        an empty one; a result that cannot stand where it is becomes the user's word."""
        stop = self.stop_token_ids[0]
        ends = [(stop,), *((token, stop) for token in self.control_tokens if self.ends_thinking(token))]
        told = [row | {"role": "user"} for row in rows]
        for wanted in (rows, told):
            for end in ends:
                if (added := self.behind(wanted, (stop,), end, tools)) is not None:
                    closed = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
                    return added if closed else [(stop, False), *added]
        raise ValueError(f"model {self._model}: family {self.name} has no way to go on after this turn")

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text of which no part becomes a control token."""
        return self.tokenizer.encode(self.tokenizer.protect(text))

    def tail(self, prompt_ids: Sequence[int]) -> str:
        """The end of a stream as text: with what its last turn was opened."""
        return self.tokenizer.decode(prompt_ids[-_TAIL:])

    def ends_thinking(self, token_id: int) -> bool:
        token = self.control_tokens.get(token_id, "")
        return token.startswith("</think") or token == "<channel|>"

    def opens_thinking(self, token_id: int) -> bool:
        token = self.control_tokens.get(token_id, "")
        return token.startswith("<think") or token == "<|channel>"

    def _open(self, options: dict[str, Any]) -> Any:
        # Imported here: the package takes a second, and most models need none of it.
        from pydantic import TypeAdapter
        from renderers import RendererConfig, create_renderer

        config = TypeAdapter(RendererConfig).validate_python({"name": self.name} | options)
        try:
            return create_renderer(self.tokenizer, config)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"model {self._model}: family {self.name} does not fit its tokenizer: {_one_line(error)}"
            ) from error

    def _specs(self, tools: Sequence[ToolSpec]) -> list[Any] | None:
        return [self.tokenizer.protect_all(tool.as_openai()) for tool in tools] or None

    def _stop_tokens(self) -> tuple[int, ...]:
        stops: list[int] = self._renderer.get_stop_token_ids()
        loose = {*stops, *self.tokenizer.placed_ids.values()} - self.control_tokens.keys()
        if loose:
            names = ", ".join(repr(self.tokenizer.decode([token])) for token in sorted(loose))
            raise ValueError(
                f"model {self._model}: family {self.name} places {names}, which its tokenizer does not list as added "
                "tokens, so that any text could become them; use a tokenizer that lists them"
            )
        rendered = self.render([ASKED, Message(role="assistant", content="."), ASKED], (), header=False)
        written = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        ends = [token for token, message, sampled in written if message == 1 and sampled and token in stops]
        return tuple(dict.fromkeys([*ends[-1:], *stops]))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
