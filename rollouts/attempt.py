"""What a schedule knows of a group, of each try at one of its trajectories, and of what was sampled for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from data.types import Completion, SamplingParams, Segment, TokenStream
from envs.types import Task
from rollouts.accounting import common_prefix, cost_usd, count_turns
from rollouts.config import PricesConfig
from rollouts.engine import Engine, EngineInFront
from rollouts.types import StopReason, Trajectory, TrajectoryGroup, Turn, asked_turn, trajectory_name


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A group that is not over."""

    group_id: str
    task: Task
    siblings: tuple[int, ...]
    ended: dict[int, Trajectory] = field(default_factory=dict)
    lost: list[Trajectory] = field(default_factory=list)
    is_cancelled: bool = False

    def result(self) -> TrajectoryGroup:
        return TrajectoryGroup(
            group_id=self.group_id,
            task=self.task,
            trajectories=tuple(self.ended[index] for index in self.siblings),
            lost=tuple(self.lost),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One try at one trajectory; `number` counts the tries that were lost before it.

    turns: its calls of the engine as the schedule sees them: how many tokens went in and came out, not what they say.
    """

    group: Group
    sibling_index: int
    number: int = 0
    not_before: float = 0.0
    order: int = -1
    turns: list[Turn] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    context: Sequence[int] = ()
    task: asyncio.Task[Trajectory] | None = None
    alarm: asyncio.TimerHandle | None = None
    stopped: str | None = None

    @property
    def trajectory_id(self) -> str:
        return trajectory_name(self.group.group_id, self.sibling_index, self.number)

    def next_one(self, *, not_before: float) -> Attempt:
        return Attempt(
            group=self.group, sibling_index=self.sibling_index, number=self.number + 1, not_before=not_before
        )

    @property
    def has_asked(self) -> bool:
        return bool(self.turns)

    def ask(self, prompt_ids: Sequence[int]) -> None:
        """A prompt goes to the engine."""
        repeated = common_prefix(self.context, prompt_ids)
        self.turns.append(asked_turn(len(self.turns), prompt_tokens=len(prompt_ids), repeated=repeated))
        self.context = prompt_ids

    def answer(self, completion: Completion) -> None:
        """The engine's answer to what was asked last."""
        self.completions.append(completion)
        self.turns[-1] = replace(
            self.turns[-1],
            cached_prompt_tokens=completion.cached_prompt_tokens,
            sampled_tokens=len(completion.token_ids),
        )

    def stop(self, why: str) -> None:
        self.stopped = self.stopped or why
        if self.task is not None:
            self.task.cancel()

    def cut_short(self, why: str, prices: PricesConfig) -> Trajectory:
        """What is left of an attempt that gave no trajectory: what was sampled for it is in the ledger and must be
        accounted for, and so must what its calls cost; what they say, what stood between them and how long they took
        is lost."""
        stream = TokenStream([Segment.sampled(completion) for completion in self.completions if completion.token_ids])
        return Trajectory(
            trajectory_id=self.trajectory_id,
            task_id=self.group.task.task_id,
            group_id=self.group.group_id,
            sibling_index=self.sibling_index,
            streams=(stream,) if len(stream) else (),
            turns=tuple(self.turns),
            stop_reason=StopReason.CANCELLED,
            reward=None,
            error=why,
            cost_usd=cost_usd(count_turns(self.turns), prices),
            attempt=self.number,
        )


class WatchedEngine(EngineInFront):
    """The engine of a schedule: it tells when a trajectory asks and when it has its answer. `on_call`, which gets the
    completion's id and its prompt, may refuse: what it raises, the trajectory gets, and nothing is sampled."""

    def __init__(
        self,
        engine: Engine,
        on_call: Callable[[str, Sequence[int]], None],
        on_answer: Callable[[str, Completion | None], None],
    ) -> None:
        super().__init__(engine)
        self._on_call = on_call
        self._on_answer = on_answer
        self.calls = 0
        self.sampled_tokens = 0

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        completion: Completion | None = None
        self._on_call(completion_id, prompt_ids)
        self.calls += 1
        try:
            completion = await super().generate(completion_id, prompt_ids, params)
            self.sampled_tokens += len(completion.token_ids)
            return completion
        finally:
            self.calls -= 1
            self._on_answer(completion_id, completion)
