"""A renderer of which every token can be counted by hand: a letter is a token, and control tokens are numbers above.

    [user]hi[end][assistant]        the prompt
    hm[/think]so[call]{…}[end]      a turn: thinking, prose, a call (a JSON object with name and arguments)
    [tool]42[end][assistant]        the bridge

With `drops_thinking`, thinking is dropped when an observation comes, as some templates do, so that every turn that
thought makes a new stream. With `late` too, the last turn's is still kept then, and dropped one observation later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby

from data.tool_formats.base import CallError, ParsedTurn
from data.types import FinishReason, Segment, Source
from envs.types import Message, ToolCall, ToolSpec

CONTROLS = ("[system]", "[user]", "[assistant]", "[tool]", "[end]", "[call]", "[/think]")
FIRST = 0x110000
"""The first id that is no code point."""
IDS = {name: FIRST + index for index, name in enumerate(CONTROLS)}
END, CALL, CLOSE = IDS["[end]"], IDS["[call]"], IDS["[/think]"]


class Letters:
    """See the module. `grammar` is what `structural_tag` gives."""

    name = "letters"
    stop_token_ids = (END,)
    control_tokens: Mapping[int, str] = {token: name for name, token in IDS.items()}
    several_calls = True

    def __init__(self, *, drops_thinking: bool = False, late: bool = False, grammar: str | None = None) -> None:
        self._drops_thinking = drops_thinking
        self._late = late
        self._grammar = grammar

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        ids: list[int] = []
        for message in messages:
            body = self.turn_ids(message) if message.role == "assistant" else [*map(ord, message.content), END]
            ids += [IDS[f"[{message.role}]"], *body]
        return [Segment(source=Source.PROMPT, token_ids=(*ids, IDS["[assistant]"]))]

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[Segment] | None:
        if self._drops_thinking and CLOSE in (prompt_ids if self._late else sampled_ids):
            return None
        marked = [] if sampled_ids[-1] == END else [(END, False)]
        for message in messages:
            marked += [(IDS[f"[{message.role}]"], False), *((ord(c), True) for c in message.content), (END, False)]
        return [
            Segment(source=Source.TOOL if content else Source.TEMPLATE, token_ids=tuple(token for token, _ in run))
            for content, run in groupby([*marked, (IDS["[assistant]"], False)], key=lambda pair: pair[1])
        ]

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        thought = [] if self._drops_thinking or not message.thinking else [*map(ord, message.thinking), CLOSE]
        ids = [*thought, *map(ord, message.content)]
        for call in message.tool_calls:
            ids += [CALL, *map(ord, json.dumps({"name": call.name, "arguments": dict(call.arguments)}))]
        return (*ids, END)

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        call_id_prefix: str,
        finish_reason: FinishReason = "stop",
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        text = self.decode(token_ids[:-1] if token_ids[-1] == END else token_ids)
        thinking, closed, said = text.rpartition("[/think]")
        if said.startswith("(thinking"):  # a turn that begins so means to think
            return ParsedTurn(content="", calls=(), thinking=said, thinking_open=True)
        content, *asked = said.split("[call]")
        read = [_call(body, f"{call_id_prefix}_{index}") for index, body in enumerate(asked)]
        cut = finish_reason == "length"
        return ParsedTurn(
            content=content,
            calls=tuple(call for call in read if not (cut and isinstance(call, CallError))),
            thinking=thinking if closed else "",
        )

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        return self._grammar

    def encode_text(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.control_tokens.get(token) or chr(token) for token in token_ids)

    def count_forged(self, text: str) -> int:
        return sum(text.count(name) for name in CONTROLS)


def _call(body: str, call_id: str) -> ToolCall | CallError:
    try:
        read = json.loads(body)
        return ToolCall(call_id=call_id, name=read["name"], arguments=read["arguments"])
    except (ValueError, KeyError, TypeError) as error:
        return CallError(call_id=call_id, text=f"error: malformed tool call: {error}")
