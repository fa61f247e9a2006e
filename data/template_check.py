"""Whether a renderer made from a chat template writes what the template writes natively, token by token.

It is asked about contents that templates trim, escape, join, cut or take for data. Left out: the rendering itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from data.chat_template import ASKED, NATIVE, TRIED_TOOL
from data.turn_ends import Kind, dummy_turn
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
    for tools in ((), (TRIED_TOOL,)) if renderer.template.no_tools is None else ((),):
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
        for count in range(1, 1 if renderer.template.no_calls else 2 + renderer.several_calls):
            yield Message(role="assistant", thinking=thought, tool_calls=calls[:count])


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
        native = self._native([ASKED, turn], (), generation_prompt=False)
        if native[: len(prompt)] == prompt and not self._renderer.ends[_kind(turn)].opens_next:
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
