"""Many trajectories at once: which begins when, and what becomes of one that our machinery loses.

Each trajectory waits only for itself. A new one begins while the engine has room, so that others sample while tools
run, and no more than `schedule.max_trajectories` are in flight. Groups keep their order: what is left of a group that
has begun goes before the next group, so that its prompt is still cached and it is handed out soon.

It leaves out how one trajectory goes (`runner.py`) and what is done with its group.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from data.types import Completion
from envs.types import Task
from rollouts.attempt import Attempt, Group, WatchedEngine
from rollouts.config import ScheduleConfig
from rollouts.engine import EngineError, EngineLoad
from rollouts.outage import Outage, retry_delay_s
from rollouts.runner import Runner
from rollouts.types import StopReason, Trajectory, TrajectoryGroup

_SETTLE_S = 0.01
"""After a completion ends, its trajectory is back in the engine at once unless it waits for a tool. So long the room is
left to it; many completions that end together are one look at the engine."""
_LOOK_AGAIN_S = 0.25
"""Room may also come from others who use the engine, of whom nobody tells us."""
_PROBES = 8
"""Servers that are all down have room for nobody. So many find out when one is back, or that none comes back."""
_PARTS = 5
"""A trajectory has `limits.wall_clock_s` for each of four parts (see `LimitsConfig`); one that is not over after five
hangs."""
_LET_GO_S = 10.0
"""So long a cancelled trajectory may take to clean up; then it is cancelled again, or the run goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStatus:
    """Where a schedule stands: how many trajectories have not begun, are in flight, and wait for the engine's answer.
    `retried` counts the attempts that were begun again, `sampled_tokens` those of all completions so far."""

    queued: int
    in_flight: int
    sampling: int
    retried: int
    sampled_tokens: int
    load: EngineLoad


async def sample_groups(
    runner: Runner,
    tasks: Sequence[Task],
    *,
    num_generations: int,
    prefix: str,
    schedule: ScheduleConfig | None = None,
    on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[TrajectoryGroup]:
    """Sample `num_generations` trajectories of each task; the groups are in the order of the tasks.

    `prefix` (the step, or the evaluation's name) makes the ids unique within a run: groups are `{prefix}/{task_id}`.
    `on_done` hears of each trajectory as it ends.

    Raises:
        ValueError: two tasks have one id; their completions could not be told apart.
        OutageError: nothing ends but by failures of our machinery.
    """
    async with Scheduler(runner, schedule or ScheduleConfig(), on_done=on_done) as scheduler:
        for task in tasks:
            scheduler.submit(task, group_id=f"{prefix}/{task.task_id}", siblings=range(num_generations))
        groups = {group.group_id: group async for group in scheduler}
    return [groups[f"{prefix}/{task.task_id}"] for task in tasks]


class Scheduler:
    """Runs the trajectories of submitted groups and hands out each group when its last trajectory is over.

        async with Scheduler(runner, schedule) as scheduler:
            scheduler.submit(task, group_id="step-1/a", siblings=range(8))
            async for group in scheduler:           # in the order in which they end; more may be submitted meanwhile
                ...

    Leaving it cancels what is in flight and waits until its sandboxes and requests are gone; a warning names those that
    do not end even when they are cancelled twice. From then on, nothing is sampled for any of them.

    `on_done` hears of each trajectory as it ends; `on_lost` of each attempt that is begun again in its stead.
    """

    def __init__(
        self,
        runner: Runner,
        schedule: ScheduleConfig,
        *,
        on_done: Callable[[Trajectory], None] = lambda trajectory: None,
        on_lost: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        self._engine = WatchedEngine(runner.engine, self._on_call, self._on_answer)
        self._runner = replace(runner, engine=self._engine)
        self._schedule = schedule
        self._on_done = on_done
        self._on_lost = on_lost
        self._groups: dict[str, Group] = {}
        self._used_ids: set[str] = set()
        self._queue: deque[Attempt] = deque()
        self._again: list[Attempt] = []  # lost once, and waiting to be begun again
        self._in_flight: dict[str, Attempt] = {}  # by trajectory id, in the order in which they began
        self._begun = 0
        self._retried = 0
        self._outage = Outage()
        self._finished: deque[TrajectoryGroup] = deque()
        self._failure: BaseException | None = None
        self._news = asyncio.Event()
        self._look: asyncio.TimerHandle | None = None
        self._is_closing = False

    def submit(self, task: Task, *, group_id: str, siblings: Sequence[int]) -> None:
        """Queue the trajectories `siblings` of a task's group.

        Raises:
            ValueError: the group's id was used before, or the group has no trajectory.
        """
        if group_id in self._used_ids:
            raise ValueError(f"group {group_id}: submitted twice; two tasks of one batch have the same task_id")
        if not siblings:
            raise ValueError(f"group {group_id} has no trajectory")
        self._used_ids.add(group_id)
        group = Group(group_id=group_id, task=task, siblings=tuple(siblings))
        self._groups[group_id] = group
        self._queue.extend(Attempt(group=group, sibling_index=index) for index in siblings)
        self._look_soon(0.0)

    def cancel(self, group_id: str) -> None:
        """End a group: what is over stays, the others become `StopReason.CANCELLED`. It is handed out like any other,
        when its sandboxes and requests are gone."""
        group = self._groups.get(group_id)
        if group is None:
            return
        group.is_cancelled = True
        waiting = [attempt for attempt in (*self._again, *self._queue) if attempt.group is group]
        self._again = [attempt for attempt in self._again if attempt.group is not group]
        self._queue = deque(attempt for attempt in self._queue if attempt.group is not group)
        for attempt in waiting:
            self._settle(attempt, self._cut_short(attempt, "its group was cancelled before it began"))
        for attempt in list(self._in_flight.values()):
            if attempt.group is group:
                attempt.stop("its group was cancelled")

    def take_finished(self) -> list[TrajectoryGroup]:
        """The groups that are over and were not handed out yet, without waiting."""
        finished = list(self._finished)
        self._finished.clear()
        return finished

    @property
    def status(self) -> ScheduleStatus:
        return ScheduleStatus(
            queued=len(self._queue) + len(self._again),
            in_flight=len(self._in_flight),
            sampling=self._engine.calls,
            retried=self._retried,
            sampled_tokens=self._engine.sampled_tokens,
            load=self._engine.load,
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TrajectoryGroup:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._finished:
                return self._finished.popleft()
            if not self._groups:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        if self._look is not None:
            self._look.cancel()
        attempts = list(self._in_flight.values())
        for attempt in attempts:
            if attempt.alarm is not None:
                attempt.alarm.cancel()
        for _ in range(2):  # what swallows one cancellation often ends with the next
            for attempt in attempts:
                attempt.stop("the run ended")
            tasks = [attempt.task for attempt in attempts if attempt.task is not None and not attempt.task.done()]
            if not tasks:
                break
            await asyncio.wait(tasks, timeout=_LET_GO_S)
        self._in_flight.clear()
        deaf = [attempt.trajectory_id for attempt in attempts if attempt.task is not None and not attempt.task.done()]
        if deaf:
            warnings.warn(
                f"{len(deaf)} trajectories did not end within {2 * _LET_GO_S:g} s, though they were cancelled twice, "
                f"and are left behind: {', '.join(deaf)}; their tools or grader must let CancelledError through",
                RuntimeWarning,
                stacklevel=2,
            )

    def _look_soon(self, delay_s: float) -> None:
        """Look for room in `delay_s` seconds, or earlier if that was planned."""
        if self._is_closing:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + delay_s
        if self._look is not None:
            if self._look.when() <= when:
                return
            self._look.cancel()
        self._look = loop.call_at(when, self._admit)

    def _admit(self) -> None:
        """Begin as many trajectories as there is room for."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if self._is_closing or self._failure is not None or not (self._queue or self._again):
            return
        now = asyncio.get_running_loop().time()
        try:
            room = 0 if self._outage.held_until > now else self._room()
            while room > 0 and (attempt := self._next(now)) is not None:
                self._begin(attempt)
                room -= 1
        except Exception as failure:  # the loop that calls this would only log it
            self._fail(failure)
        if self._queue or self._again:
            self._look_soon(_LOOK_AGAIN_S)

    def _room(self) -> int:
        """How many trajectories may begin. Those that have not asked the engine yet are about to."""
        load = self._engine.load
        capacity = load.capacity or _PROBES
        limit = self._schedule.max_trajectories or 2 * capacity
        on_their_way = sum(not attempt.has_asked for attempt in self._in_flight.values())
        room = min(capacity - load.running - load.waiting - on_their_way, limit - len(self._in_flight))
        # However busy others keep the engine, something of ours must go on.
        return max(room, 0 if self._in_flight else 1)

    def _next(self, now: float) -> Attempt | None:
        due = next((attempt for attempt in self._again if attempt.not_before <= now), None)
        if due is not None:
            self._again.remove(due)
            return due
        return self._queue.popleft() if self._queue else None

    def _begin(self, attempt: Attempt) -> None:
        attempt.order = self._begun
        self._begun += 1
        self._in_flight[attempt.trajectory_id] = attempt
        run = self._runner.run(
            attempt.group.task,
            group_id=attempt.group.group_id,
            sibling_index=attempt.sibling_index,
            attempt=attempt.number,
        )
        attempt.task = asyncio.get_running_loop().create_task(run, name=attempt.trajectory_id)
        attempt.task.add_done_callback(lambda _: self._ended(attempt))
        bound_s = _PARTS * self._runner.limits.wall_clock_s
        attempt.alarm = asyncio.get_running_loop().call_later(bound_s, self._overdue, attempt, bound_s)

    def _overdue(self, attempt: Attempt, bound_s: float) -> None:
        why = f"not over after {bound_s:g} s ({_PARTS} times limits.wall_clock_s)"
        attempt.stop(why)
        attempt.alarm = asyncio.get_running_loop().call_later(_LET_GO_S, self._let_go, attempt, why)

    def _let_go(self, attempt: Attempt, why: str) -> None:
        """It does not even end when it is cancelled: the run goes on without it."""
        self._over(attempt, self._cut_short(attempt, f"{why}, and it did not end when it was cancelled"))

    def _ended(self, attempt: Attempt) -> None:
        """The task of an attempt is over."""
        task = attempt.task
        assert task is not None
        failure = None if task.cancelled() else task.exception()
        if self._in_flight.get(attempt.trajectory_id) is not attempt:
            return  # the run went on without it
        if failure is not None:  # a fault of ours: the runner turns all others into trajectories
            self._fail(failure)
        elif task.cancelled():
            self._over(attempt, self._cut_short(attempt, attempt.stopped or "cancelled"))
        else:
            self._over(attempt, task.result())

    def _cut_short(self, attempt: Attempt, why: str) -> Trajectory:
        return attempt.cut_short(why, self._runner.prices)

    def _over(self, attempt: Attempt, trajectory: Trajectory) -> None:
        del self._in_flight[attempt.trajectory_id]
        if attempt.alarm is not None:
            attempt.alarm.cancel()
        if self._is_closing:
            return
        try:
            self._settle(attempt, trajectory)
        except Exception as failure:  # such as a full disk, where the listener writes
            self._fail(failure)
        self._admit()

    def _settle(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """Keep a trajectory, or begin it again."""
        group, now = attempt.group, asyncio.get_running_loop().time()
        is_lost = trajectory.stop_reason.is_infrastructure
        if trajectory.stop_reason is StopReason.ENGINE_ERROR:
            self._outage.hold(now)
        may_retry = is_lost and not group.is_cancelled and attempt.number < self._schedule.infrastructure_retries
        if may_retry and not trajectory.is_fault:
            group.lost.append(trajectory)
            self._again.append(attempt.next_one(not_before=now + retry_delay_s(attempt.number)))
            self._retried += 1
            self._on_lost(trajectory)
            return
        group.ended[attempt.sibling_index] = trajectory
        self._on_done(trajectory)
        if len(group.ended) == len(group.siblings):
            del self._groups[group.group_id]
            self._finished.append(group.result())
            self._news.set()
        if not is_lost:
            self._outage.is_over()
        elif not group.is_cancelled:
            oldest = next(iter(self._in_flight.values()), None)
            self._outage.lost(trajectory, begun=self._begun, oldest=self._begun if oldest is None else oldest.order)

    def _fail(self, failure: BaseException) -> None:
        """End the run: whoever waits for a group gets the failure instead."""
        self._failure = self._failure or failure
        self._news.set()

    def _on_call(self, completion_id: str, prompt_ids: Sequence[int]) -> None:
        """
        Raises:
            EngineError: the run went on without the trajectory that asks; what was sampled for it now would be in the
                ledger of a later step, and in none of its groups.
        """
        attempt = self._in_flight.get(completion_id.rpartition("/")[0])
        if attempt is None or self._is_closing:
            raise EngineError(f"completion {completion_id} is not sampled: its trajectory is no longer in flight")
        attempt.ask(prompt_ids)

    def _on_answer(self, completion_id: str, completion: Completion | None) -> None:
        attempt = self._in_flight.get(completion_id.rpartition("/")[0])
        if attempt is not None and completion is not None:
            attempt.answer(completion)
        if self._queue or self._again:
            self._look_soon(_SETTLE_S)
