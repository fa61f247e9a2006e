"""Does a renderer write what the model's own chat template writes?

Both write a few conversations whose contents try what templates trim, join, escape and cut, and the ids are compared:
the prompt, the turns with calls, what stands behind a turn. A family's renderer that passes is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from data.chat import Renderer
from envs.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOOL = ToolSpec(
    name="f",
    description="Does x.",
    parameters={"type": "object", "properties": {"x": {"type": "string", "description": "It."}}, "required": ["x"]},
)
_TRIED = (
    "What is 12?",
    "",
    "\nleading",
    'trailing \t"It\'s" <&> \\n {{ x }}:\n\n\ta,  b.  ',
    "Zürich 🙂 e\u0301 ไทย 中文\u00a0.",
    '{"x": ["y", null], "n": 1.50}',
    "One more word. " * 40,
)
_ARGUMENTS = {"x": "a b", "n": 12, "yes": True, "none": None, "list": [1.5, {"y": False}], "text": "12"}


def difference(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
) -> str | None:
    """The first place where `renderer` and the tokenizer's chat template differ, in one line; None: there is none.

    Args:
        variables: what the template is rendered with besides (`enable_thinking`, `date_string`).
    """
    comparable = 0
    for what, ours, native, whole in _compared(renderer, tokenizer, dict(variables or {})):
        comparable += 1
        shown = native if whole else native[max(0, len(native) - len(ours)) :]
        if ours != shown:
            at = next(i for i in range(len(ours) + 1) if ours[: i + 1] != shown[: i + 1])
            texts = [part if isinstance(part, str) else renderer.decode(part) for part in (shown[at:], ours[at:])]
            return f"{what}: the chat template has {texts[0][:24]!r}, {renderer.name} has {texts[1][:24]!r}"
    return None if comparable else "the chat template writes none of the conversations that were tried"


def _compared(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]
) -> Iterator[tuple[str, list[int] | str, list[int] | str, bool]]:
    """What is compared, our ids, the template's, and whether ours are all of them or their end. What one of the two
    refuses to write is compared by that alone."""
    for content in _TRIED:
        for tools in ([_TOOL], []):
            for chat in ([_said("user", content)], [_said("system", content), _said("user", content)]):
                native = _native(tokenizer, chat, tools, variables)
                try:
                    ours = _opening(renderer, chat, tools)
                except ValueError:
                    ours = None
                if (ours is None) != (native is None):
                    yield "prompt", ours or [], native or [], True
                elif ours is not None and native is not None:
                    yield "prompt", ours, native, True
        for calls, prose in product((1, 2), ("", "So I look.")):
            yield from _tool_cycle(renderer, tokenizer, content, calls, prose, variables)
        yield from _next_question(renderer, tokenizer, content, variables)
        yield from _history(renderer, tokenizer, content, variables)


def _tool_cycle(
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    content: str,
    calls: int,
    prose: str,
    variables: dict[str, Any],
) -> Iterator[tuple[str, list[int] | str, list[int] | str, bool]]:
    ids = [f"functions.f:{number}" for number in range(calls)]
    asked = [_said("system", content), _said("user", "What is 12?")]
    answers = [Message(role="tool", content=content, call_id=one) for one in ids]
    asking = tuple(ToolCall(call_id=one, name="f", arguments=_ARGUMENTS) for one in ids)
    for thinking in ("Let me see.", ""):
        turn = Message(role="assistant", content=prose, thinking=thinking, tool_calls=asking)
        native = _native(tokenizer, [*asked, turn, *answers], [_TOOL], variables)
        try:
            sampled = list(renderer.turn_ids(turn))
        except ValueError:
            continue  # thinking is off, or the template writes one call at most
        prompt = _opening(renderer, asked, [_TOOL])
        ours = _bridge(renderer, prompt, sampled, answers)
        if native is None or ours is None:
            continue
        yield f"behind {calls} calls", ours, native, False
        # As text: a turn may be cut into other tokens where its header ended.
        yield f"a turn of {calls} calls", renderer.decode([*prompt, *sampled, *ours]), renderer.decode(native), True
        return  # a header that opens the thinking makes a turn without any another one than the template's


def _next_question(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, content: str, variables: dict[str, Any]
) -> Iterator[tuple[str, list[int] | str, list[int] | str, bool]]:
    """Only what follows the answer: the template may rewrite the answer itself, by dropping its thinking."""
    asked, answer, question = [_said("user", "What is 12?")], _said("assistant", "Twelve."), _said("user", content)
    native = _native(tokenizer, [*asked, answer, question], [], variables)
    try:
        sampled = list(renderer.turn_ids(answer))
    except ValueError:
        return
    ours = _bridge(renderer, _opening(renderer, asked, []), sampled, [question])
    if native is not None and ours is not None:
        yield "behind an answer", [sampled[-1], *ours], native, False


def _history(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, content: str, variables: dict[str, Any]
) -> Iterator[tuple[str, list[int] | str, list[int] | str, bool]]:
    """A prompt with an answer that lies behind, without thinking: a family may give it an empty one. As text: it may be
    cut into other tokens where its header ended."""
    chat = [_said("user", "What is 12?"), _said("assistant", content), _said("user", "And 13?")]
    native = _native(tokenizer, chat, [], variables)
    try:
        ours = _opening(renderer, chat, [])
    except ValueError:
        return  # it says so when it is asked for one
    if native is not None:
        yield "an answer that lies behind", renderer.decode(ours), renderer.decode(native), True


def _opening(renderer: Renderer, chat: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
    return [token for segment in renderer.opening(chat, tools) for token in segment.token_ids]


def _bridge(renderer: Renderer, prompt: list[int], sampled: list[int], answers: Sequence[Message]) -> list[int] | None:
    bridge = renderer.bridge(answers, prompt_ids=prompt, sampled_ids=sampled, tools=[_TOOL])
    return None if bridge is None else [token for segment in bridge for token in segment.token_ids]


def _native(
    tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], tools: Sequence[ToolSpec], variables: dict[str, Any]
) -> list[int] | None:
    """The template's own ids of a conversation; None where it refuses it."""
    rows = [message.as_openai() for message in chat]
    specs: list[Any] = [tool.as_openai() for tool in tools]
    for form in (rows, _with_json_arguments(rows)):
        try:
            text = tokenizer.apply_chat_template(
                form, tools=specs or None, add_generation_prompt=True, tokenize=False, **variables
            )
        except (TemplateError, TypeError):
            continue  # some templates take arguments as JSON text only
        assert isinstance(text, str)
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    return None


def _with_json_arguments(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def call_row(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        row | ({"tool_calls": list(map(call_row, row["tool_calls"]))} if "tool_calls" in row else {}) for row in rows
    ]


def _said(role: Any, content: str) -> Message:
    return Message(role=role, content=content)
