"""Advantages for tests that only need some: one for each trajectory, the same at all of its turns."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.types import TrajectoryGroup


def by_turn(group: TrajectoryGroup, advantages: Sequence[float | None]) -> dict[str, tuple[float, ...]]:
    """As `rollouts.samples.group_samples` takes them; None: the trajectory has no reward."""
    return {
        trajectory.trajectory_id: (advantage,) * len(trajectory.completion_ids)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        if advantage is not None
    }
