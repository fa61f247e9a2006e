"""Groups: the trajectories of one task, sampled together, many groups at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from envs.types import Task
from rollouts.runner import Runner
from rollouts.types import Trajectory, TrajectoryGroup


async def sample_groups(
    runner: Runner,
    tasks: Sequence[Task],
    *,
    num_generations: int,
    prefix: str,
    max_concurrent: int,
    on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[TrajectoryGroup]:
    """Sample `num_generations` trajectories of each task, at most `max_concurrent` at once; each waits only for itself.

    `prefix` (the step, or the evaluation's name) makes the ids unique within a run: groups are `{prefix}/{task_id}`.
    `on_done` hears of each trajectory as it ends.

    Raises:
        ValueError: two tasks have one id; their completions could not be told apart.
    """
    if len({task.task_id for task in tasks}) != len(tasks):
        raise ValueError("two tasks of one batch have the same task_id")
    places = asyncio.Semaphore(max_concurrent)

    async def attempt(task: Task, sibling_index: int) -> Trajectory:
        async with places:
            trajectory = await runner.run(task, group_id=f"{prefix}/{task.task_id}", sibling_index=sibling_index)
        on_done(trajectory)
        return trajectory

    async with asyncio.TaskGroup() as running:
        attempts = [[running.create_task(attempt(task, i)) for i in range(num_generations)] for task in tasks]
    return [
        TrajectoryGroup(
            group_id=f"{prefix}/{task.task_id}", task=task, trajectories=tuple(one.result() for one in siblings)
        )
        for task, siblings in zip(tasks, attempts, strict=True)
    ]
