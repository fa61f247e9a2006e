"""A model family's hand-written renderer (package `renderers`) as one of ours: behind the guard, and append-only.

What the package knows is kept: the family's prompt, a bridge that never renders the history again, its stop tokens.
Around it stands the guard (`data/family_tokenizer.py`), since the package lets control tokens in contents through.
Left out: which families there are (`data/families.py`), how they take messages (`data/family_messages.py`), which one a
model is of (`data/open_renderer.py`), and how the package's reading of a turn becomes ours (`data/family_turns.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from data.families import family_traits
from data.family_messages import FamilyMessages
from data.family_tokenizer import FamilyTokenizer
from data.family_turns import read_response
from data.guard import Guard
from data.tool_formats.base import ParsedTurn, ToolFormat
from data.types import FinishReason, Segment, Source
from envs.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from renderers import ParsedResponse, ParsedToolCall, RenderedTokens
    from transformers import PreTrainedTokenizerBase

Thinking = Literal["keep", "follow"]

# So much of a stream is enough to see how its last turn was opened; a long one is not copied at every turn.
_TAIL = 64
_ASKED = Message(role="user", content=".")
_EXAMPLE = ToolCall(call_id="call_0", name="tool_name", arguments={"argument": "value"})


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
        self._traits = family_traits(family)
        self._thinking = thinking
        self._format = tool_format
        self._guard = Guard(tokenizer)
        self.control_tokens = self._guard.control_tokens
        self._tokenizer = FamilyTokenizer(tokenizer, self._guard)
        self._messages = FamilyMessages(self._tokenizer, self._traits)
        options: dict[str, Any] = {}
        if enable_thinking is not None:
            if self._traits.switch is None:
                raise ValueError(f"family {family} has no switch for thinking; take enable_thinking out")
            options[self._traits.switch] = enable_thinking
        self._package: Any = self._open(options)
        self._template_keeps: str = self._package.effective_thinking_retention
        if thinking == "keep":
            self._package = self._open(options | {"thinking_retention": "all"})
        self.stop_token_ids = self._stop_tokens()
        self.several_calls = self._writes_several_calls()
        self._example = self._example_call()
        self.differs: str | None = None
        """Where it differs from the model's own chat template."""
        self.description = self._describe()

    def note_difference(self, difference: str | None) -> None:
        """Have the description say where this renderer differs from the model's own chat template."""
        self.differs = difference
        self.description = self._describe()

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        rendered = self._render(messages, tools, header=True)
        return [Segment(source=Source.PROMPT, token_ids=tuple(rendered.token_ids))]

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[Segment] | None:
        rows = self._answers(messages, prompt_ids, sampled_ids)
        added = self._added(rows, prompt_ids, sampled_ids, tools)
        if added is None and self._rewrites(messages):
            return None
        if added is None:
            added = self._added_after_any_turn(rows, sampled_ids, tools)
        return [
            Segment(source=Source.TOOL if is_content else Source.TEMPLATE, token_ids=tuple(token for token, _ in run))
            for is_content, run in groupby(added, key=lambda pair: pair[1])
        ]

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        if len(message.tool_calls) > 1 and not self.several_calls:
            raise ValueError(
                f"family {self.name} cannot hold the {len(message.tool_calls)} tool calls of one turn; give each call "
                "a turn of its own"
            )
        return self._turn_ids(message)

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        call_id_prefix: str,
        finish_reason: FinishReason = "stop",
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        text = self.decode(token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids)
        if self._format is None:
            return read_response(
                lambda: self._read(token_ids, prompt_ids, tools),
                text,
                call_id_prefix=call_id_prefix,
                finish_reason=finish_reason,
                example=self._example,
            )
        return self._format.parse(
            text,
            call_id_prefix=call_id_prefix,
            finish_reason=finish_reason,
            tools=tools,
            # A header is the last thing in a prompt; no content can stand where its marker does.
            in_thinking=self.decode(prompt_ids[-_TAIL:]).rstrip().endswith("<think>"),
        )

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        return self._format.structural_tag(tools) if self._format else None

    def encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(self._tokenizer.protect(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def count_forged(self, text: str) -> int:
        return self._guard.count_forged(text)

    # The package: its renderer, what goes in, what comes out.

    def _open(self, options: dict[str, Any]) -> Any:
        # Imported here: the package takes a second, and most models need none of it.
        from pydantic import TypeAdapter
        from renderers import RendererConfig, create_renderer

        config = TypeAdapter(RendererConfig).validate_python({"name": self.name} | options)
        try:
            return create_renderer(self._tokenizer, config)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"model {self._model}: family {self.name} does not fit its tokenizer: {_one_line(error)}"
            ) from error

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, header: bool) -> RenderedTokens:
        specs = [self._tokenizer.protect_all(tool.as_openai()) for tool in tools]
        try:
            return self._package.render(
                self._messages.rows(messages), tools=specs or None, add_generation_prompt=header
            )
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            roles = ", ".join(message.role for message in messages) or "no messages"
            raise ValueError(
                f"model {self._model}: family {self.name} cannot write a conversation of {roles}: {_one_line(error)}"
            ) from error

    def _added(
        self, rows: list[Any], prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> list[tuple[int, bool]] | None:
        """The ids behind a turn, each with whether it holds content; None where the package goes on from no such turn,
        or would have to render it again."""
        if not sampled_ids:
            return None
        # A stop token inside a turn (of a stop list other than ours) ends nothing.
        body = [token for token in sampled_ids[:-1] if token not in self.stop_token_ids] + list(sampled_ids[-1:])
        ended = self._traits.forgets_separator and body[-1] == self.stop_token_ids[0] and len(body) > 1
        body = body[:-1] if ended else body
        known = [*prompt_ids[-_TAIL:], *body]
        specs = [self._tokenizer.protect_all(tool.as_openai()) for tool in tools]
        rendered = self._package.bridge_to_next_turn(known[: -len(body)], body, rows, tools=specs or None)
        if rendered is None:
            return None
        assert rendered.token_ids[: len(known)] == known, f"family {self.name} rewrote a sampled turn"
        return list(zip(rendered.token_ids, rendered.is_content, strict=True))[len(known) + ended :]

    def _added_after_any_turn(
        self, rows: list[Any], sampled_ids: Sequence[int], tools: Sequence[ToolSpec]
    ) -> list[tuple[int, bool]]:
        """The same for a turn that the family's templates could not have written: one whose thinking has no end, a
        result that answers no call. What comes next does not depend on what the turn says, so it is taken from behind
        an empty one; a result that cannot stand where it is becomes the user's word."""
        stop = self.stop_token_ids[0]
        ends = [(stop,), *((token, stop) for token in self.control_tokens if self._ends_thinking(token))]
        told = [row | {"role": "user"} for row in rows]
        for wanted in (rows, told):
            for end in ends:
                if (added := self._added(wanted, (stop,), end, tools)) is not None:
                    closed = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
                    return added if closed else [(stop, False), *added]
        raise ValueError(f"model {self._model}: family {self.name} has no way to go on after this turn")

    def _read(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedResponse:
        specs = [tool.as_openai() for tool in tools]
        return self._package.parse_response(
            list(token_ids), tools=specs or None, prompt_ids=list(prompt_ids[-_TAIL:]) or None
        )

    def _rewrites(self, messages: Sequence[Message]) -> bool:
        """Whether the family's template, which we are told to follow, drops thinking when these messages come."""
        if self._thinking == "keep" or self._template_keeps == "all":
            return False
        return self._template_keeps == "template" or any(message.role == "user" for message in messages)

    def _answers(
        self, messages: Sequence[Message], prompt_ids: Sequence[int], sampled_ids: Sequence[int]
    ) -> list[dict[str, Any]]:
        """The messages behind a sampled turn, as the package takes them."""
        calls: list[ParsedToolCall] = []
        if self._messages.answers_need_calls(messages):
            try:
                calls = self._read(sampled_ids, prompt_ids, ()).tool_calls
            except Exception:  # whatever the package's parser does with what a model wrote
                calls = []
        return self._messages.answers(messages, calls)

    def _ends_thinking(self, token_id: int) -> bool:
        token = self.control_tokens.get(token_id, "")
        return token.startswith("</think") or token == "<channel|>"

    # What is found out once, at start-up.

    def _stop_tokens(self) -> tuple[int, ...]:
        """The family's stop tokens, the one first that ends an ordinary turn."""
        stops: list[int] = self._package.get_stop_token_ids()
        loose = {*stops, *self._tokenizer.placed_ids.values()} - self.control_tokens.keys()
        if loose:
            names = ", ".join(repr(self._tokenizer.decode([token])) for token in sorted(loose))
            raise ValueError(
                f"model {self._model}: family {self.name} places {names}, which its tokenizer does not list as added "
                "tokens, so that any text could become them; use a tokenizer that lists them"
            )
        rendered = self._render([_ASKED, Message(role="assistant", content="."), _ASKED], (), header=False)
        written = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        ends = [token for token, message, sampled in written if message == 1 and sampled and token in stops]
        return tuple(dict.fromkeys([*ends[-1:], *stops]))

    def _describe(self) -> str:
        """One line for start-up: what writes the ids, what becomes of thinking, what ends a turn, what is guarded."""
        kept = {
            "all": "all thinking stays",
            "tool_cycle": "its template drops earlier thinking when a user message comes",
            "template": "its template drops earlier thinking at every turn",
        }[self._template_keeps]
        if self._template_keeps != "all":
            kept += ": kept here, streams only grow" if self._thinking == "keep" else ": followed, in a new stream"
        stops = " ".join(self.control_tokens[token] for token in self.stop_token_ids)
        calls = self._format.name if self._format else "its own"
        pinned = "".join(f"; {key} is {value}" for key, value in self._traits.pinned.items())
        differs = f"; it differs from the model's chat template: {self.differs}" if self.differs else ""
        return (
            f"family {self.name}, hand-written; {kept}; turns end with {stops}; calls: {calls}{pinned}; "
            f"{len(self.control_tokens)} control tokens guarded{differs}"
        )

    def _writes_several_calls(self) -> bool:
        try:
            self._render([_ASKED, Message(role="assistant", tool_calls=(_EXAMPLE, _EXAMPLE))], (), header=False)
        except ValueError:
            return False
        return True

    def _example_call(self) -> str:
        """A call as the family writes it, for a model that wrote one in another way."""
        try:
            turn = self._turn_ids(Message(role="assistant", tool_calls=(_EXAMPLE,)))
        except ValueError:
            return f"{_EXAMPLE.name} with the arguments {dict(_EXAMPLE.arguments)}"
        begin = max(place for place, token in enumerate((0, *turn)) if place == 0 or self._ends_thinking(token))
        return self.decode(turn[begin:-1]).strip()

    def _turn_ids(self, message: Message) -> tuple[int, ...]:
        ids = self._behind_header(message)
        if ids is None and not message.thinking:
            # The header opens the thinking, and the family writes no thinking where there is none: as a policy would
            # have to, it is closed at once.
            ids = self._behind_header(replace(message, thinking="."), left_out=".")
        if ids is None:
            raise ValueError(
                f"family {self.name} writes no turn {'with' if message.thinking else 'without'} thinking behind the "
                "header that it gives a turn to be sampled; see enable_thinking"
            )
        if message.thinking and self._ends_thinking(ids[0]):
            # Dropped from what counts as history, and yet the header opened it.
            ids = (*self.encode_text(message.thinking), *ids)
        return ids if ids[-1] in self.stop_token_ids else (*ids, self.stop_token_ids[0])

    def _behind_header(self, message: Message, left_out: str = "") -> tuple[int, ...] | None:
        """A turn as the family writes it, without what its header holds already and without `left_out` behind that;
        None where the turn does not begin so. The header's last token may have grown together with the turn's first
        (`\n` + `\n`): what is left of it is encoded anew, as a policy would have to sample it."""
        answers = [Message(role="tool", content=".", call_id=call.call_id) for call in message.tool_calls]
        rendered = self._render([_ASKED, message, *answers], (), header=False)
        written = enumerate(zip(rendered.message_indices, rendered.sampled_mask, strict=True))
        end = max(place for place, (index, by_model) in written if index == 1 and by_model) + 1
        if max(rendered.message_indices[:end]) > 1:
            raise ValueError(f"family {self.name} writes the prose of a turn behind the results of its calls; drop it")
        ids, header = rendered.token_ids[:end], self.opening([_ASKED], ())[0].token_ids
        same = next((i for i, (a, b) in enumerate(zip(header, ids, strict=False)) if a != b), min(len(header), end))
        missing = self.decode(header[same:]) + left_out
        for middle in range(same, end + 1):
            text = self.decode(ids[same:middle])
            # As texts they may look the same and be others: what a message says looks like a token of the header.
            if not missing.startswith(text[: len(missing)]) or any(
                token in self.control_tokens for token in [*header[same:], *ids[same:middle]]
            ):
                return None
            if text.startswith(missing):
                return (*self.encode_text(text[len(missing) :]), *ids[middle:])
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
