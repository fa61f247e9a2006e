"""Which groups does a step train, and how far may sampling run ahead of it?

Tasks come in one endless row: group i is of the i-th task, whatever else happens, so a run that continues samples what
it would have sampled. At most `(max_staleness + 1) * tasks_per_step` groups are begun and not yet trained. While a step
takes what it trains, only groups are left behind that may still be trained one step later; it waits for the others. So
the bound holds for each trajectory, no sampled one is ever thrown away for its age, and with `max_staleness = 0` the
same code samples exactly a step's own groups, with the weights that the step updates.

The bound, in steps: a group begun with the weights after v updates is trained by update v + 1 + max_staleness at the
latest. When update s takes its groups, those begun before the weights of s - max_staleness are at most
`tasks_per_step`: `s * tasks_per_step` at most were begun by then, and (s - 1) * tasks_per_step of them are trained.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from data.jsonl import line_writer, read_lines
from envs.types import Task
from rollouts.scheduler import Scheduler
from rollouts.types import TrajectoryGroup
from train.config import GrpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup:
    """A group that is over and waits to be trained. `version` counts the updates of the weights that it was begun with,
    `index` is its place in the row of tasks."""

    index: int
    version: int
    group: TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedState:
    """What a checkpoint keeps: how many groups were begun, which of them were not over (they are begun again), and
    those that waited to be trained."""

    begun: int = 0
    unfinished: tuple[int, ...] = ()
    ready: tuple[SampledGroup, ...] = ()

    def is_kept(self, group_id: str) -> bool:
        """Whether what was sampled for a group still counts."""
        index = group_index(group_id)
        return index < self.begun and index not in self.unfinished


def write_feed_state(path: Path, state: FeedState) -> None:
    path.write_bytes(line_writer(FeedState)(state))


def read_feed_state(path: Path) -> FeedState:
    """
    Raises:
        ValueError: the file holds no such state.
    """
    state = next(read_lines(path, TypeAdapter(FeedState)), None)
    if state is None:
        raise ValueError(f"{path}: there is no whole line in it; delete this checkpoint to go on from an earlier one")
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """What a step takes: the groups that it trains, and those that had nothing to learn from and were replaced."""

    trained: tuple[TrajectoryGroup, ...]
    replaced: tuple[TrajectoryGroup, ...]


class GroupFeed:
    """Keeps `scheduler` supplied with groups and hands out each step's.

    Args:
        is_dead: whether there is nothing to learn from a group. Such a group is replaced by one of a further task, at
            most `config.max_resampled_groups` times a step (the dynamic sampling of DAPO, arXiv:2503.14476).
        state: where a run that continues left off; its unfinished groups are begun again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tasks: Sequence[Task],
        *,
        config: GrpoConfig,
        seed: int,
        is_dead: Callable[[TrajectoryGroup], bool],
        state: FeedState,
    ) -> None:
        self._scheduler = scheduler
        self._groups: AsyncIterator[TrajectoryGroup] = aiter(scheduler)
        self._tasks = tasks
        self._config = config
        self._seed = seed
        self._is_dead = is_dead
        self._begun = state.begun
        self._again = list(state.unfinished)
        self._in_flight: dict[int, int] = {}
        """The version that each was begun with, by index."""
        self._ready = list(state.ready)

    async def take(self, step: int) -> StepGroups:
        """The groups of update `step` (1, 2, …), in the order of their tasks; sampling goes on with what may be trained
        later.

        Raises:
            OutageError: nothing ends but by failures of our machinery.
        """
        count, version = self._config.tasks_per_step, step - 1
        replaced: list[TrajectoryGroup] = []
        while True:
            self._replace_dead(replaced)
            self._begin(version, room_for=count, steps_taken=step - 1)
            if len(self._ready) >= count and not self._must_wait(step):
                break
            self._ready.append(self._over(await anext(self._groups)))
        self._ready.sort(key=lambda one: (one.version, one.index))
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._begin(version, room_for=0, steps_taken=step)
        taken.sort(key=lambda one: one.index)
        return StepGroups(trained=tuple(one.group for one in taken), replaced=tuple(replaced))

    def state(self) -> FeedState:
        """Between two steps."""
        self._ready += map(self._over, self._scheduler.take_finished())
        unfinished = tuple(sorted([*self._again, *self._in_flight]))
        return FeedState(begun=self._begun, unfinished=unfinished, ready=tuple(self._ready))

    def _begin(self, version: int, *, room_for: int, steps_taken: int) -> None:
        """Begin groups until there are `room_for` for the step that is about to take its own and enough for
        `max_staleness` steps more; none that no step of the run would take."""
        config = self._config
        ahead = config.max_staleness * config.tasks_per_step
        wanted = min(room_for + ahead, (config.max_steps - steps_taken) * config.tasks_per_step)
        while len(self._in_flight) + len(self._ready) < wanted:
            if self._again:
                index = self._again.pop(0)
            else:
                index, self._begun = self._begun, self._begun + 1
            task = task_at(self._tasks, index, self._seed)
            self._in_flight[index] = version
            group_id = f"group-{index}/{task.task_id}"
            self._scheduler.submit(task, group_id=group_id, siblings=range(config.num_generations))

    def _over(self, group: TrajectoryGroup) -> SampledGroup:
        index = group_index(group.group_id)
        return SampledGroup(index=index, version=self._in_flight.pop(index), group=group)

    def _replace_dead(self, replaced: list[TrajectoryGroup]) -> None:
        for one in list(self._ready):
            if len(replaced) < self._config.max_resampled_groups and self._is_dead(one.group):
                self._ready.remove(one)
                replaced.append(one.group)

    def _must_wait(self, step: int) -> bool:
        """Whether a group is unfinished that the next step could not train any more."""
        return any(version < step - self._config.max_staleness for version in self._in_flight.values())


def task_at(tasks: Sequence[Task], index: int, seed: int) -> Task:
    """The task of group `index` (0, 1, …): each epoch goes through all tasks in an order of its own."""
    epoch, place = divmod(index, len(tasks))
    return tasks[random.Random(f"{seed}/{epoch}").sample(range(len(tasks)), len(tasks))[place]]


def group_index(group_id: str) -> int:
    """
    >>> group_index("group-7/train-0-3")
    7
    """
    return int(group_id.partition("/")[0].removeprefix("group-"))
