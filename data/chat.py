"""Chat ↔ tokens: how messages become ids, and where a sampled turn ends.

`TemplateRenderer` serves any Jinja chat template that puts message contents into the text unchanged. It renders the
template with a placeholder for each content, places the template's own control tokens by id, and encodes the text
between them with control tokens disabled: no content can become a control token, whatever it says. The ids of a
history are never made again; a bridge is appended to what was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateError
from tokenizers import Tokenizer

from data.tool_calls import CLOSE, OPEN, format_calls, parse_turn
from data.tool_formats.base import ParsedTurn
from data.types import FinishReason, Segment, Source
from envs.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Placeholders are private-use characters around a number: no template holds them, and no trimming removes them.
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")

# A template is tried with these: an ordinary content, one with all that a template may trim, escape, join or cut, and
# one that it may take for data.
_TRIED_CONTENTS = (
    "What is 12?",
    '  "It\'s" <&> \\n {{ x }}:\n\n\ta,  b.' + " One more word." * 40 + "  ",
    '\n{"x": ["y", null], "n": 1.50}\n',
)
_TRIED_TOOL = ToolSpec(name="f", description="Does x.", parameters={"type": "object", "properties": {}})


class Renderer(Protocol):
    """One seam for every model family."""

    name: str
    """What wrote the ids: `template`, or the family."""
    stop_token_ids: tuple[int, ...]
    control_tokens: Mapping[int, str]
    several_calls: bool
    """Whether one assistant turn may hold more than one tool call."""

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


class TemplateRenderer:
    """A renderer made from a tokenizer's own chat template.

    Args:
        tokenizer: a fast tokenizer with a `chat_template`.
        name: what error messages call the model.

    Raises:
        ValueError: there is no template, it fails, changes contents or has no end of turn, or the ids differ from
            those of the native rendering.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, name: str) -> None:
        if not tokenizer.chat_template:
            raise ValueError(f"model {name}: no chat template; add chat_template.jinja to the model folder")
        self._tokenizer = tokenizer
        self._name = name
        self.control_tokens: Mapping[int, str] = {
            token_id: token.content
            for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
            if token.content.strip()
        }
        self._control_ids = {text: token_id for token_id, text in self.control_tokens.items()}
        # The longest first: one token's text may begin with another's.
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(re.escape(text) for text in longest_first) or r"(?!)")
        self._content_encoder = _without_control_tokens(tokenizer)
        self.stop_token_ids = (self._end_of_turn(),)
        self.several_calls = True
        for content in _TRIED_CONTENTS:
            for tools in ([_TRIED_TOOL], []):
                self._verify(content, tools, calls=1)
        self.several_calls = self._follows_several_calls()

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        if messages:
            pieces = self._pieces(messages, tools)
        else:
            # transformers renders no empty conversation; what stands before a first assistant turn is its opening.
            pieces = self._pieces([Message(role="assistant", content=".")], tools, add_generation_prompt=False)[:1]
        marked = self._encode(pieces)
        return [Segment(source=Source.PROMPT, token_ids=tuple(token for token, _ in marked))]

    name = "template"

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[Segment]:
        marked = self._encode(self._after_turn(messages))
        if sampled_ids[-1] in self.stop_token_ids:
            # The closing token was sampled: it is MODEL already.
            marked = marked[1:]
        return [
            Segment(
                source=Source.TOOL if holds_content else Source.TEMPLATE, token_ids=tuple(token for token, _ in run)
            )
            for holds_content, run in groupby(marked, key=lambda pair: pair[1])
        ]

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        if len(message.tool_calls) > 1 and not self.several_calls:
            raise ValueError(
                f"model {self._name}: its chat template cannot hold the {len(message.tool_calls)} tool calls of one "
                "turn; give each call a turn of its own"
            )
        pieces = [(piece, piece not in (OPEN, CLOSE)) for piece in format_calls(message.tool_calls)]
        separator = "\n" if message.content and pieces else ""
        marked = self._encode([(message.content + separator, True), *pieces])
        return (*(token for token, _ in marked), self.stop_token_ids[0])

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        call_id_prefix: str,
        finish_reason: FinishReason = "stop",
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        body = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids
        # Control tokens are kept: a parser that does not see the call markers finds no call.
        text = self._tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return parse_turn(text, call_id_prefix=call_id_prefix)

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        return None

    def encode_text(self, text: str) -> list[int]:
        return self._content_encoder.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def count_forged(self, text: str) -> int:
        return len(self._control_pattern.findall(text))

    def _encode(self, pieces: Iterable[tuple[str, bool]]) -> list[tuple[int, bool]]:
        """The ids of (text, is it content) pieces, each with whether it holds content.

        Control tokens come from the template's pieces alone, by id. What stands between two of them is encoded in one
        go, as in the native rendering: many tokenizers have a token for a full stop and the line break after it.
        """
        marked: list[tuple[int, bool]] = []
        run: list[tuple[str, bool]] = []
        for text, is_content in pieces:
            place = 0
            for control in () if is_content else self._control_pattern.finditer(text):
                run.append((text[place : control.start()], False))
                marked += [*self._encode_run(run), (self._control_ids[control[0]], False)]
                run, place = [], control.end()
            run.append((text[place:], is_content))
        return marked + self._encode_run(run)

    def _encode_run(self, run: Sequence[tuple[str, bool]]) -> list[tuple[int, bool]]:
        text = "".join(part for part, _ in run)
        encoding = self._content_encoder.encode(text, add_special_tokens=False)
        forged = [self.control_tokens[token] for token in encoding.ids if token in self.control_tokens]
        if forged:
            raise ValueError(f"model {self._name}: content became the control token {forged[0]!r}: {text[:80]!r}")
        is_content = [flag for part, flag in run for _ in part]
        # A token that holds a character of the content belongs to it. Some tokenizers give spans without width.
        return [
            (token, any(is_content[start : max(end, start + 1)]))
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def _pieces(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, add_generation_prompt: bool = True
    ) -> list[tuple[str, bool]]:
        """The rendering as (text, is it content) pieces, in order. Assistant turns must be plain text."""
        specs: list[Any] = [tool.as_openai() for tool in tools]
        forged = self._control_pattern.search(json.dumps(specs, ensure_ascii=False))
        if forged:
            raise ValueError(f"a tool description holds the control token {forged[0]!r}; reword it")
        chat = [_with_placeholders(message, index) for index, message in enumerate(messages)]
        text = self._render(chat, specs, add_generation_prompt=add_generation_prompt)
        parts = _PLACEHOLDER.split(text)
        found = [int(number) for number in parts[1::2] if int(number) % 2 == 0]
        if found != list(range(0, 2 * len(messages), 2)):
            raise ValueError(f"model {self._name}: its chat template drops, repeats or moves message contents")
        values = [value for message in messages for value in (message.content, message.call_id or "")]
        return [(values[int(part)], True) if index % 2 else (part, False) for index, part in enumerate(parts)]

    def _render(self, chat: list[dict[str, Any]], tools: list[Any], *, add_generation_prompt: bool = True) -> str:
        """The text that the template makes of a conversation."""
        try:
            text = self._tokenizer.apply_chat_template(
                chat, tools=tools or None, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in chat)
            raise ValueError(
                f"model {self._name}: its chat template fails on a conversation of {roles}: "
                f"{' '.join(str(error).split())}; mend chat_template.jinja in the model folder"
            ) from error
        assert isinstance(text, str)
        return text

    def _after_turn(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """The pieces that follow the content of an assistant turn when `messages` come next."""
        before = [Message(role="user", content="."), Message(role="assistant", content=".")]
        return self._pieces([*before, *messages], ())[4:]

    def _end_of_turn(self) -> int:
        """The token with which the template ends an assistant turn."""
        before = [Message(role="user", content="."), Message(role="assistant", content=".")]
        closing = self._pieces(before, (), add_generation_prompt=False)[4][0]
        ids = [token for token, _ in self._encode([(closing, False)])]
        if not ids or ids[0] not in self.control_tokens:
            raise ValueError(
                f"model {self._name}: its chat template ends assistant turns with {closing[:20]!r}, which does not "
                "begin with one of the tokenizer's added tokens; no turn could be stopped"
            )
        return ids[0]

    def _follows_several_calls(self) -> bool:
        """Some templates refuse a turn with two calls, or write them in a way of their own."""
        try:
            self._verify(_TRIED_CONTENTS[0], [_TRIED_TOOL], calls=2)
        except ValueError:
            return False
        return True

    def _verify(self, content: str, tools: Sequence[ToolSpec], *, calls: int) -> None:
        """Our ids of a conversation with tool calls must be the ids of the native rendering.

        Raises:
            ValueError: they differ; the message shows the first place.
        """
        chat = _tried_chat(content, calls)
        ours = [token for segment in self.opening(chat[:2], tools) for token in segment.token_ids]
        turn = self.turn_ids(chat[2])
        bridge = self.bridge(chat[3:], prompt_ids=ours, sampled_ids=turn, tools=tools)
        ours += [*turn, *(token for segment in bridge for token in segment.token_ids)]
        text = self._render([message.as_openai() for message in chat], [tool.as_openai() for tool in tools])
        native = list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
        if ours != native:
            where = next(i for i in range(len(ours) + 1) if ours[: i + 1] != native[: i + 1])
            raise ValueError(
                f"model {self._name}: its chat template cannot be followed token by token; at token {where} it has "
                f"{self._tokenizer.decode(native[where : where + 8])!r}, ours is "
                f"{self._tokenizer.decode(ours[where : where + 8])!r}"
            )


def _tried_chat(content: str, calls: int) -> list[Message]:
    """A conversation of all roles that says `content` wherever a template could change it."""
    ids = [f"call_{number}" for number in range(calls)]
    asked = tuple(ToolCall(call_id=one, name="f", arguments={"x": "a b", "n": 12}) for one in ids)
    return [
        Message(role="system", content=content),
        Message(role="user", content=content),
        Message(role="assistant", tool_calls=asked),
        *(Message(role="tool", content=content, call_id=one) for one in ids),
    ]


def _without_control_tokens(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the tokenizer for which no text is a control token.

    Added tokens that are not marked special (`<tool_call>` in Qwen's tokenizer) would still match, so the copy marks
    them all; runs of white space are text and keep their tokens.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    for token in state["added_tokens"]:
        token["special"] = bool(token["content"].strip())
    # It adds nothing here, and it may cut blanks off the spans of tokens.
    state["post_processor"] = None
    copy = Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy


def _with_placeholders(message: Message, index: int) -> dict[str, Any]:
    """The message as a template gets it: numbers `2 · index` and `2 · index + 1` for its content and its call id, which
    may come from a file and must not become control tokens either."""
    if message.tool_calls:
        raise ValueError("an assistant turn with tool calls is sampled or encoded by turn_ids, never rendered")
    row = message.as_openai() | {"content": f"\ue000{2 * index}\ue001"}
    if message.call_id is not None:
        row["tool_call_id"] = f"\ue000{2 * index + 1}\ue001"
    return row
