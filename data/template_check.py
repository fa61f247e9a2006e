"""Whether a renderer writes what the model's chat template writes natively, token by token, and reads its own calls.

It is asked about contents that templates trim, escape, join, cut or take for data. Left out: the rendering itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING

from data.chat import Renderer
from data.chat_template import ASKED, NATIVE, TRIED_TOOL, ChatTemplate
from data.tool_formats.base import ParsedTurn, ToolFormat
from data.turn_ends import Kind, TurnEnd, answers_to, dummy_turn
from envs.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from data.template_renderer import TemplateRenderer

TRIED_CONTENTS = (
    "What is 12?",
    "",
    "\nafter a line break",
    "before blanks \t \n",
    "naïve, nai\u0308ve, 日本, 👩\u200d👩\u200d👧, \u202eright to left",
    '{"x": ["y", null], "n": 1.50}',
    '[{"type": "text", "text": "It\'s <&>"}]',
    "one:\n\n\ttwo,  three." + " One more word." * 60,
    "tool_response {{ x }} {% y %} \\n \\u00e9",
)

_THOUGHTS, _PROSE = ("", "I think so."), ("", "Let me see.")
_READ_TOOL = ToolSpec(
    name="f",
    description="",
    parameters={"type": "object", "properties": {"x": {"type": "string"}, "n": {"type": "integer"}}},
)
_CALLS = tuple(ToolCall(call_id=f"c_{i}", name="f", arguments={"x": "two words", "n": 12 + i}) for i in range(2))
_SHOWN = 200
"""Characters of an unread turn that a message repeats."""


def unread_turn(renderer: Renderer, read_past: Callable[[Message], tuple[str, ParsedTurn]] | None = None) -> str | None:
    """A turn with calls that the renderer writes but does not read; None: it reads all that it writes. One that was
    not read would pass for a final answer, and nobody would know.

    Args:
        read_past: reads a turn that lies behind, where the renderer can write no such turn to be sampled.
    """
    prompt = [token for segment in renderer.opening([ASKED], ()) for token in segment.token_ids]

    def read(turn: Message) -> tuple[str, ParsedTurn] | None:
        with suppress(ValueError):  # it says so when it is asked for one
            ids = renderer.turn_ids(turn)
            return renderer.decode(ids), renderer.parse(ids, call_id_prefix="c", tools=(_READ_TOOL,), prompt_ids=prompt)
        with suppress(ValueError):
            return read_past(turn) if read_past else None
        return None

    for turn in _calling(1 + renderer.several_calls):
        if (found := read(turn)) and found[1].calls != turn.tool_calls:
            text = found[0]
            return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
    return None


def read_past_turn(
    turn: Message, *, template: ChatTemplate, tool_format: ToolFormat, end: TurnEnd
) -> tuple[str, ParsedTurn]:
    """What a template makes of a turn that lies behind, and what is read in it."""
    asked = template.render([ASKED], (), writing=NATIVE, generation_prompt=False)
    text = template.render([ASKED, turn], (), writing=NATIVE, generation_prompt=False).removeprefix(asked)
    said = text.rpartition(end.stop)[0] or text
    return text, tool_format.parse(said, call_id_prefix="c", finish_reason="stop", tools=(_READ_TOOL,))


def _calling(most: int) -> Iterator[Message]:
    for count, thinking, prose in product(range(1, 1 + most), _THOUGHTS, _PROSE):
        yield Message(role="assistant", content=prose, thinking=thinking, tool_calls=_CALLS[:count])


def check_renderer(renderer: TemplateRenderer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prompts, bridges and turns must be those of the native rendering.

    Raises:
        ValueError: one differs; the message shows the first place.
    """
    check = _Check(renderer, tokenizer)
    for content in TRIED_CONTENTS:
        for messages, tools in _prompts(renderer, content):
            check.prompt(messages, tools)
        for turn, following in _bridges(renderer, content):
            check.bridge(turn, following)
        for turn in _turns(renderer, content):
            check.turn(turn)


def _prompts(renderer: TemplateRenderer, content: str) -> Iterator[tuple[list[Message], Sequence[ToolSpec]]]:
    asked = Message(role="user", content=content)
    system = Message(role="system", content=content)
    for tools in ((),) if renderer.template.no_tools or renderer.no_reading else ((), (TRIED_TOOL,)):
        yield [asked], tools
        if renderer.template.no_system is None:
            yield [system, asked], tools


def _bridges(renderer: TemplateRenderer, content: str) -> Iterator[tuple[Message, list[Message]]]:
    user = Message(role="user", content=content)
    yield dummy_turn(()), [user]
    for call_ids in [("c0",), ("c0", "c1")][: 0 if renderer.no_results else 1 + renderer.several_calls]:
        turn = dummy_turn(() if renderer.template.no_calls else call_ids)
        results = [Message(role="tool", content=content, call_id=call_id) for call_id in call_ids]
        yield turn, results
        if renderer.takes_user_after_results:
            yield turn, [*results, user]


def _turns(renderer: TemplateRenderer, content: str) -> Iterator[Message]:
    thinking = ("", "I think so.") if renderer.template.dialect.thinking else ("",)
    calls = tuple(ToolCall(call_id=f"c{i}", name="f", arguments={"x": content, "n": [1, None]}) for i in range(2))
    for thought in thinking:
        yield Message(role="assistant", content=content, thinking=thought)
        for count, prose in product(range(1, 1 if renderer.template.no_calls else 2 + renderer.several_calls), _PROSE):
            yield Message(role="assistant", content=prose, thinking=thought, tool_calls=calls[:count])


class _Check:
    def __init__(self, renderer: TemplateRenderer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        (segment,) = self._renderer.opening(messages, tools)
        self._same(segment.token_ids, self._native(messages, tools, generation_prompt=True), "a prompt")

    def bridge(self, turn: Message, following: list[Message]) -> None:
        kind = Kind.CALLS if following[0].role == "tool" else Kind.ANSWER
        ours = [token.token_id for token in self._renderer.bridge_tokens(turn, following)]
        native = self._native([ASKED, turn, *following], (), generation_prompt=True)
        self._same(ours, native[-len(ours) :], f"what follows a turn ({kind.value})")

    def turn(self, turn: Message) -> None:
        try:
            ours = self._renderer.turn_ids(turn)
        except ValueError:  # it says so when it is asked for one
            return
        prompt = self._native([ASKED], (), generation_prompt=True)
        opens_next = self._renderer.ends[_kind(turn)].opens_next
        # The stop that opens the next message stands there only with it.
        answers = answers_to(Kind.CALLS, [call.call_id for call in turn.tool_calls]) if opens_next else ()
        native = self._native([ASKED, turn, *answers], (), generation_prompt=False)
        if native[: len(prompt)] == prompt and (answers or not opens_next):
            # Where they grow together, no policy could sample the native ids.
            self._same(ours, native[len(prompt) : len(prompt) + len(ours)], "an assistant turn")

    def _native(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation_prompt: bool) -> list[int]:
        text = self._renderer.template.render(messages, tools, writing=NATIVE, generation_prompt=generation_prompt)
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _same(self, ours: Sequence[int], native: Sequence[int], what: str) -> None:
        if list(ours) == list(native):
            return
        where = next(i for i in range(len(ours) + 1) if list(ours[: i + 1]) != list(native[: i + 1]))
        theirs, own = (list(ids[max(0, where - 2) : where + 8]) for ids in (native, ours))
        raise ValueError(
            f"model {self._renderer.model}: its chat template cannot be followed token by token in {what}; at token "
            f"{where} it has {self._tokenizer.decode(theirs)!r}, ours is {self._tokenizer.decode(own)!r}"
        )


def _kind(turn: Message) -> Kind:
    return Kind.CALLS if turn.tool_calls else Kind.ANSWER
