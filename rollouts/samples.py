"""Trajectories → training samples: which sampled tokens are trained, with which advantage, and why others are not."""

from __future__ import annotations

from collections.abc import Sequence

from data.rows import SampleBuilder
from data.types import Excluded, Source, TrainingSample
from rollouts.types import Trajectory, TrajectoryGroup


def group_samples(
    group: TrajectoryGroup, advantages: Sequence[float | None], *, mask_truncated: bool
) -> list[TrainingSample]:
    """One sample for each stream of the group: those of its trajectories in order, then those of its lost attempts.

    Args:
        advantages: one for each trajectory, in order; None where it has no reward. All zero: the group is dead.
        mask_truncated: leave out the trajectories that a limit of ours cut (TRL: `mask_truncated_completions`).
    """
    dead = not any(advantages)
    samples = [
        sample
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        for sample in _trajectory_samples(
            trajectory, advantage or 0.0, _excluded(trajectory, advantage, dead=dead, mask_truncated=mask_truncated)
        )
    ]
    for trajectory in group.lost:
        samples += _trajectory_samples(trajectory, 0.0, Excluded.INFRASTRUCTURE)
    return samples


def _excluded(trajectory: Trajectory, advantage: float | None, *, dead: bool, mask_truncated: bool) -> Excluded | None:
    if trajectory.stop_reason.is_infrastructure or advantage is None:
        return Excluded.INFRASTRUCTURE
    if dead:
        return Excluded.DEAD_GROUP
    if mask_truncated and trajectory.stop_reason.is_truncated:
        return Excluded.TRUNCATED
    return None


def _trajectory_samples(trajectory: Trajectory, advantage: float, excluded: Excluded | None) -> list[TrainingSample]:
    samples: list[TrainingSample] = []
    for stream in trajectory.streams:
        builder = SampleBuilder(trajectory.trajectory_id)
        for segment in stream:
            if segment.source is Source.MODEL:
                builder.add_sampled(segment, advantage=advantage, excluded=excluded)
            else:
                builder.add_context(segment)
        samples.append(builder.build())
    return samples
