"""What a trajectory has so far: streams, conversation, turns. It survives whatever ends the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from data.tool_formats.base import CallError, ParsedTurn
from data.types import Completion, Segment, TokenStream
from envs.types import Message, ToolCall
from rollouts.accounting import TokenCount, common_prefix
from rollouts.tool_call import CallOutcome
from rollouts.types import Turn, asked_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the next completion would be sampled after. It joins a stream only when one is.

    segments: what it adds, to the last stream or to a new one.
    token_ids: all of it `[n]`.
    repeated: how many of them, from the first on, the previous call's context began with too.
    """

    segments: Sequence[Segment]
    new_stream: bool
    token_ids: list[int]
    repeated: int

    @property
    def count(self) -> TokenCount:
        """The input of the call."""
        return TokenCount(calls=1, input=len(self.token_ids), fresh=len(self.token_ids) - self.repeated)


@dataclass(slots=True, kw_only=True)
class Progress:
    """`messages` is the conversation as it is graded; `count` what the calls of the model came to, `unfinished` the one
    that has become no turn."""

    trajectory_id: str
    opening: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    streams: list[TokenStream] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    count: TokenCount = field(default_factory=TokenCount)
    unfinished: Turn | None = None
    forged: int = 0
    _asked: Prompt | None = None

    def prompt(self, segments: Sequence[Segment], *, new_stream: bool) -> Prompt:
        """The prompt that these segments make."""
        token_ids = [] if new_stream else self.streams[-1].token_ids
        for segment in segments:
            token_ids += segment.token_ids
        before = [] if self._asked is None else self._asked.token_ids
        repeated = common_prefix(before, token_ids) if new_stream else len(before)
        return Prompt(segments=segments, new_stream=new_stream, token_ids=token_ids, repeated=repeated)

    def ask(self, prompt: Prompt) -> None:
        """The prompt goes to the engine. It is in no stream before the answer is there: a trainer has no use for what
        nothing follows."""
        self._asked = prompt
        self.count += prompt.count
        self.unfinished = asked_turn(len(self.turns), prompt_tokens=len(prompt.token_ids), repeated=prompt.repeated)

    def add_sampled(self, completion: Completion) -> None:
        """What was sampled is on record at once, whatever comes of it, as it is in the ledger; and so is what was asked
        before."""
        prompt, asked = self._asked, self.unfinished
        assert prompt is not None
        assert asked is not None
        cached, sampled = completion.cached_prompt_tokens, len(completion.token_ids)
        self.count += TokenCount(output=sampled, engine_cached=cached)
        self.unfinished = replace(asked, cached_prompt_tokens=cached, sampled_tokens=sampled)
        if prompt.new_stream:
            self.streams.append(TokenStream())
        for segment in (*prompt.segments, Segment.sampled(completion)):
            self.streams[-1].append(segment)

    def add_turn(self, completion: Completion, prompt: Prompt, parsed: ParsedTurn, generate_s: float) -> None:
        """What the completion says. It is no part of the conversation yet: half an answer is no answer, and a call that
        was not answered is none."""
        turn = Turn(
            index=len(self.turns),
            message=_message(parsed),
            tool_results=(),
            generate_s=generate_s,
            env_s=0.0,
            stream=len(self.streams) - 1,
            prompt_tokens=len(prompt.token_ids),
            repeated_prompt_tokens=prompt.repeated,
            cached_prompt_tokens=completion.cached_prompt_tokens,
            sampled_tokens=len(completion.token_ids),
            thinking_open=parsed.thinking_open and completion.finish_reason == "stop",
            invalid_calls=sum(isinstance(call, CallError) for call in parsed.calls),
        )
        self.turns.append(turn)
        self.unfinished = None

    def add_answer(self) -> None:
        """The last turn is a final answer."""
        self.messages.append(self.turns[-1].message)

    def add_results(self, outcomes: Sequence[CallOutcome], env_s: float) -> None:
        """The calls of the last turn have run."""
        results = tuple(outcome.result for outcome in outcomes)
        turn = self.turns[-1]
        self.turns[-1] = replace(
            turn,
            tool_results=results,
            env_s=env_s,
            invalid_calls=sum(outcome.invalid for outcome in outcomes),
            tool_failures=tuple(outcome.failure for outcome in outcomes if outcome.failure is not None),
            retries=sum(outcome.retries for outcome in outcomes),
            deadlines=sum(outcome.late for outcome in outcomes),
            loop_held_s=max(outcome.loop_held_s for outcome in outcomes),
        )
        self.messages.append(turn.message)
        self.messages += [Message(role="tool", content=one.content, call_id=one.call_id) for one in results]


def _message(parsed: ParsedTurn) -> Message:
    calls = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
    return Message(role="assistant", content=parsed.content, thinking=parsed.thinking, tool_calls=calls)
