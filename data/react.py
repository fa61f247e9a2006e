"""ReAct for a chat model without tool support: the tools, the calls and the results as plain messages.

    system      … the tools, and how to use them
    user        How warm is it in Paris?
    assistant   Thought: I need the weather.
                Action: get_weather({"location": "Paris"})
    user        Observation: {"temp_c": 18}
    assistant   Thought: I have it.
                Final answer: 18 °C

`data.tool_formats.react` reads the turns. Ids, bridges and the guard are the inner renderer's: an observation is the
content of a user message, and no control token comes out of it. That the text of an observation imitates a label is
nothing that plain text can prevent; it stands in a turn of the user's and is never read as a call.

Generation is stopped by token ids alone, so a model may go on after its action and invent an observation. The invention
stays in the stream (it was sampled) and the real observation follows it; it never enters the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby

from data.chat import Renderer
from data.tool_formats.base import ParsedTurn
from data.tool_formats.detect import tool_format
from data.tool_formats.react import HOW_TO, LABEL
from data.tool_formats.turn import opens_thinking
from data.types import FinishReason, Segment
from envs.types import Message, ToolSpec

_TEACHING = f"""You can use tools. While you need one, write:

Thought: what you want to find out
{HOW_TO}

with the arguments as one JSON object. Then stop: what the tool returns comes as an Observation. Several Action lines \
in one turn are run together. When you know enough, write instead:

Thought: why you know enough
Final answer: your answer

The tools:"""
_TAIL = 16
"""Tokens at the end of a prompt in which an opened thinking shows."""


class ReactRenderer:
    """The `Renderer` of ReAct text over that of a chat model.

    Args:
        inner: renders plain conversations of the model. Where its template has no system role, the tools are told at
            the beginning of the first user message.
    """

    name = "react"
    several_calls = True

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner
        self._format = tool_format("react")
        self.stop_token_ids = inner.stop_token_ids
        self.control_tokens: Mapping[int, str] = inner.control_tokens
        self._has_system_role = _has_system_role(inner)
        self.description = f"ReAct text over {inner.description}"

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        plain = _plain(messages)
        if tools:
            plain = self._taught(plain, tools)
        return self._inner.opening(plain, ())

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[Segment] | None:
        return self._inner.bridge(_plain(messages), prompt_ids=prompt_ids, sampled_ids=sampled_ids, tools=())

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        return self._inner.turn_ids(Message(role="assistant", content=write_turn(message)))

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        call_id_prefix: str,
        finish_reason: FinishReason = "stop",
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        stopped = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self._format.parse(
            self.decode(token_ids[:-1] if stopped else token_ids),
            call_id_prefix=call_id_prefix,
            finish_reason=finish_reason,
            tools=tools,
            in_thinking=opens_thinking(self.decode(prompt_ids[-_TAIL:])),
        )

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        return self._format.structural_tag(tools)

    def encode_text(self, text: str) -> list[int]:
        return self._inner.encode_text(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._inner.decode(token_ids)

    def count_forged(self, text: str) -> int:
        return self._inner.count_forged(text)

    def _taught(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
        """The conversation with the tools told in its first system message, or its first user message."""
        role = "system" if self._has_system_role else "user"
        lines = [
            f"{tool.name}: {tool.description} Arguments: {json.dumps(dict(tool.parameters), ensure_ascii=False)}"
            for tool in tools
        ]
        teaching = "\n".join((_TEACHING, *lines))
        if not messages or messages[0].role != role:
            return [Message(role=role, content=teaching), *messages]
        said = (messages[0].content, teaching) if role == "system" else (teaching, messages[0].content)
        return [Message(role=role, content="\n\n".join(filter(None, said))), *messages[1:]]


def write_turn(message: Message) -> str:
    """An assistant message in ReAct's form. What it says beside its calls is a thought; without calls it is the answer.

    >>> call = ToolCall(call_id="1", name="add", arguments={"x": 1})
    >>> print(write_turn(Message(role="assistant", content="Let me add.", tool_calls=(call,))))
    Thought: Let me add.
    Action: add({"x": 1})
    """
    thoughts = [message.thinking, message.content if message.tool_calls else ""]
    # A line of a thought that begins like a label would be read as one, and a marker would swallow the call behind it.
    thought = LABEL.sub(lambda found: f"> {found[0]}", "\n".join(filter(None, thoughts)))
    thought = thought.replace("<think>", "< think>")
    lines = [f"Thought: {thought}"] if thought else []
    for call in message.tool_calls:
        lines.append(f"Action: {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})")
    if not message.tool_calls:
        lines.append(f"Final answer: {message.content}")
    return "\n".join(lines)


def _plain(messages: Sequence[Message]) -> list[Message]:
    """The conversation without calls and results. Results that follow each other, and what the user says behind them,
    are one message: many templates want user and assistant by turns."""
    plain: list[Message] = []
    for asked, run in groupby(messages, key=lambda message: message.role in ("tool", "user")):
        together = list(run)
        results = [message for message in together if message.role == "tool"]
        if asked and results:
            said = [message.content for message in together if message.role == "user"]
            plain.append(Message(role="user", content="\n\n".join((*_observations(results), *said))))
        else:
            plain += [_spoken(message) for message in together]
    return plain


def _observations(results: Sequence[Message]) -> list[str]:
    if len(results) == 1:
        return [f"Observation: {results[0].content}"]
    return [f"Observation {number}: {result.content}" for number, result in enumerate(results, start=1)]


def _spoken(message: Message) -> Message:
    if message.role != "assistant":
        return message
    return Message(role="assistant", content=write_turn(message), train=message.train)


def _has_system_role(inner: Renderer) -> bool:
    try:
        inner.opening([Message(role="system", content="."), Message(role="user", content=".")], ())
    except ValueError:
        return False
    return True
