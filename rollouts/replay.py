"""A recorded trajectory run again through the same loop, without an engine, tools or a sandbox.

The record says what was sampled and what tools gave back; all else (the prompt, the bridges, what a turn says, when it
ends) is made anew by renderer, parser and runner. Whatever then comes out differently was changed since: a template, a
renderer, a parser, a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, cast

from data.chat import Renderer
from data.types import Completion, SamplingParams, Source, TokenStream
from envs.base import Grade, Split
from envs.sandbox.base import Sandbox, SandboxError, SandboxSpec
from envs.types import Message, Task, ToolCall, ToolResult
from rollouts.config import LimitsConfig, PricesConfig, SamplingConfig
from rollouts.engine import EngineError, EngineLoad, SyncReport
from rollouts.reward import TURN_TERM
from rollouts.runner import Runner
from rollouts.types import StopReason, Trajectory, Turn

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rollouts.engine_adapter import AdapterWeights

_ENDED_FROM_OUTSIDE = frozenset(
    {StopReason.WALL_CLOCK, StopReason.SANDBOX_ERROR, StopReason.ENGINE_ERROR, StopReason.CANCELLED}
)
"""Nothing in the record makes a trajectory end so; replayed, it ends where the record does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Runs recorded trajectories again, with the renderer and the configuration that they were sampled with."""

    renderer: Renderer
    limits: LimitsConfig
    sampling: SamplingConfig
    prices: PricesConfig
    max_context_tokens: int

    async def run(self, recorded: Trajectory) -> Trajectory:
        """The trajectory as it comes out today.

        Raises:
            ValueError: the record does not hold what the trajectory began with.
        """
        if not recorded.opening:
            raise ValueError(f"trajectory {recorded.trajectory_id}: its record has no opening messages")
        runner = Runner(
            engine=ReplayEngine(recorded, max_context_tokens=self.max_context_tokens),
            renderer=self.renderer,
            env=ReplayEnv(recorded),
            sandboxes=NoSandboxes(),
            limits=self.limits,
            sampling=self.sampling,
            prices=self.prices,
            tool_timeout_s=self.limits.wall_clock_s,
            seed=0,
        )
        return await runner.run(
            Task(task_id=recorded.task_id, prompt=""),
            group_id=recorded.group_id,
            sibling_index=recorded.sibling_index,
            attempt=recorded.attempt,
        )

    async def differences(self, recorded: Trajectory) -> list[str]:
        """What comes out differently today, one line each with its place; nothing where streams, masks and turns are
        the same. Errors as `run`."""
        replayed = await self.run(recorded)
        from_outside = recorded.stop_reason in _ENDED_FROM_OUTSIDE
        found = [
            *_stream_differences(_sampled(recorded.streams), replayed.streams, self.renderer.decode),
            *_turn_differences(recorded.turns, replayed.turns),
        ]
        if not from_outside and replayed.stop_reason is not recorded.stop_reason:
            why = f" ({replayed.cause})" if replayed.error else ""
            found.append(f"it ended by {recorded.stop_reason.value}, now by {replayed.stop_reason.value}{why}")
        # One that was lost before its first turn may have ended before they were counted.
        if recorded.forged != replayed.forged and (recorded.turns or not from_outside):
            found.append(f"forged control tokens: {recorded.forged}, now {replayed.forged}")
        return [f"{recorded.trajectory_id}: {line}" for line in found]


def _sampled(streams: Sequence[TokenStream]) -> list[TokenStream]:
    """Each stream up to the last token that was sampled. What was asked last and never answered is in older records,
    and nothing tells whether it would be asked again."""
    kept: list[TokenStream] = []
    for stream in streams:
        sampled = [index for index, segment in enumerate(stream) if segment.source is Source.MODEL]
        if sampled:
            kept.append(TokenStream(stream.segments[: sampled[-1] + 1]))
    return kept


def _stream_differences(
    recorded: Sequence[TokenStream], replayed: Sequence[TokenStream], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """The first token of each stream that differs, by id or by who wrote it. Masks and samples are made of these two,
    so they are the same where nothing differs."""
    found: list[str] = []
    if len(recorded) != len(replayed):
        found.append(f"{len(recorded)} streams, now {len(replayed)}")
    for number, (old, new) in enumerate(zip(recorded, replayed, strict=False)):
        for place, (was, now) in enumerate(zip_longest(_tokens(old), _tokens(new))):
            if was != now:
                found.append(f"stream {number}, token {place}: {_named(was, decode)}, now {_named(now, decode)}")
                break
    return found


def _tokens(stream: TokenStream) -> list[tuple[int, Source]]:
    return [(token, segment.source) for segment in stream for token in segment.token_ids]


def _named(token: tuple[int, Source] | None, decode: Callable[[Sequence[int]], str]) -> str:
    return "none" if token is None else f"{token[0]} {decode([token[0]])!r} ({token[1].value})"


def _turn_differences(recorded: Sequence[Turn], replayed: Sequence[Turn]) -> list[str]:
    """The first turn that differs, in what it says or in what answered it."""
    for old, new in zip_longest(recorded, replayed):
        if old is None or new is None:
            return [f"{len(recorded)} turns, now {len(replayed)}"]
        for what, was, now in (
            ("stream", old.stream, new.stream),
            ("thinking", old.message.thinking, new.message.thinking),
            ("content", old.message.content, new.message.content),
            ("calls", _asked(old), _asked(new)),
            ("results", _given(old), _given(new)),
        ):
            if was != now:
                return [f"turn {old.index}: {what}: {was!r}, now {now!r}"]
    return []


def _asked(turn: Turn) -> list[tuple[str, str, Mapping[str, object]]]:
    return [(call.call_id, call.name, dict(call.arguments)) for call in turn.message.tool_calls]


def _given(turn: Turn) -> list[tuple[str, str]]:
    return [(result.call_id, result.content) for result in turn.tool_results]


class ReplayEngine:
    """Answers with the completions of a recorded trajectory, whatever it is asked."""

    policy_version = 0
    load = EngineLoad(running=0, waiting=0, capacity=1)

    def __init__(self, recorded: Trajectory, *, max_context_tokens: int) -> None:
        self.max_context_tokens = max_context_tokens
        self._segments = {
            segment.completion_id: segment
            for stream in recorded.streams
            for segment in stream
            if segment.source is Source.MODEL
        }

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """The recorded completion of that id.

        Raises:
            EngineError: the record has none.
        """
        segment = self._segments.get(completion_id)
        if segment is None:
            raise EngineError(f"the record has no completion {completion_id}")
        return Completion(
            completion_id=completion_id,
            token_ids=segment.token_ids,
            logprobs=segment.logprobs,
            finish_reason="stop" if segment.token_ids[-1] in params.stop_token_ids else "length",
            policy="replay",
            policy_version=segment.policy_version,
            forced=segment.forced,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Refused: a record holds no model."""
        raise EngineError("a record cannot score")

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> SyncReport:
        """Refused: a record holds no model."""
        raise EngineError("a record takes no weights")

    async def load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        """Refused: a record holds no model."""
        raise EngineError("a record takes no weights")

    async def sleep(self, *, keep_weights: bool = True) -> bool:
        return False

    async def wake(self) -> None:
        """Always awake."""

    async def close(self) -> None:
        """Nothing to close."""


class ReplayEnv:
    """Opens as a recorded trajectory did, and answers its calls with the recorded results."""

    name = "replay"

    def __init__(self, recorded: Trajectory) -> None:
        self._recorded = recorded
        self.tools = recorded.tools

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return []

    def opening(self, task: Task) -> list[Message]:
        return list(self._recorded.opening)

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        return SandboxSpec()

    def session(self, task: Task, sandbox: Sandbox) -> ReplaySession:
        return ReplaySession(self._recorded)

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        raise NotImplementedError("a record demonstrates nothing")


class ReplaySession:
    """The results and the reward of a recorded trajectory."""

    def __init__(self, recorded: Trajectory) -> None:
        self._results = {result.call_id: result for turn in recorded.turns for result in turn.tool_results}
        self._grade = Grade(
            terms={name: value for name, value in recorded.reward_terms.items() if name != TURN_TERM},
            turn_rewards=dict(enumerate(recorded.turn_rewards)),
        )

    async def call(self, call: ToolCall) -> ToolResult:
        """The recorded result.

        Raises:
            SandboxError: the record has none.
        """
        result = self._results.get(call.call_id)
        if result is None:
            raise SandboxError(f"the record has no result of call {call.call_id}")
        return result

    async def grade(self, messages: Sequence[Message]) -> Grade:
        return self._grade


class NoSandboxes:
    """For tools that need no sandbox: what it starts can only be closed."""

    name = "none"

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return cast("Sandbox", _NoSandbox())

    async def close(self) -> None:
        """Nothing to close."""


class _NoSandbox:
    async def close(self) -> None:
        """Nothing to close."""
