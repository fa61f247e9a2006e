"""Trajectories → training samples: which sampled tokens are trained, with which advantage, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.rows import SampleBuilder
from data.types import Excluded, Source, TrainingSample
from rollouts.types import Trajectory, TrajectoryGroup


def group_samples(
    group: TrajectoryGroup,
    advantages: Mapping[str, Sequence[float]],
    *,
    mask_truncated: bool,
    oldest_version: int = 0,
) -> list[TrainingSample]:
    """One sample for each stream of the group: those of its trajectories in order, then those of its lost attempts.

    Args:
        advantages: by trajectory id, one for each turn `[turns]`; every token sampled in turn k gets the k-th, in
            whichever stream it lies. A trajectory without an entry has no usable reward. All zero: the group is dead.
        mask_truncated: leave out the trajectories that a limit of ours cut (TRL: `mask_truncated_completions`).
        oldest_version: leave out the trajectories with a token of older weights, which a server that is behind the
            others may have given.

    Raises:
        ValueError: a trajectory has not one advantage for each of its turns, or turns without any sampled token.
    """
    dead = gives_no_gradient(group, advantages)
    samples: list[TrainingSample] = []
    for trajectory in group.trajectories:
        _check_sampled(trajectory)
        by_turn = advantages.get(trajectory.trajectory_id)
        excluded = _excluded(trajectory, by_turn, dead=dead, mask_truncated=mask_truncated)
        if excluded is None and trajectory.oldest_version < oldest_version:
            excluded = Excluded.STALE
        samples += _trajectory_samples(trajectory, by_turn, excluded)
    for trajectory in group.lost:
        samples += _trajectory_samples(trajectory, None, Excluded.INFRASTRUCTURE)
    return samples


def gives_no_gradient(group: TrajectoryGroup, advantages: Mapping[str, Sequence[float]]) -> bool:
    """No turn of the group has an advantage: it gives no gradient."""
    return not any(any(advantages.get(trajectory.trajectory_id, ())) for trajectory in group.trajectories)


def _check_sampled(trajectory: Trajectory) -> None:
    """Turns made of messages alone would train nothing, and nobody would know."""
    if trajectory.turns and not trajectory.completion_ids and not trajectory.stop_reason.is_infrastructure:
        raise ValueError(
            f"trajectory {trajectory.trajectory_id}: {len(trajectory.turns)} turns, but no MODEL segment; "
            "a turn needs the token ids and logprobs that the engine sampled"
        )


def _excluded(
    trajectory: Trajectory, by_turn: Sequence[float] | None, *, dead: bool, mask_truncated: bool
) -> Excluded | None:
    if trajectory.stop_reason.is_infrastructure or by_turn is None:
        return Excluded.INFRASTRUCTURE
    if dead:
        return Excluded.DEAD_GROUP
    if mask_truncated and trajectory.stop_reason.is_truncated:
        return Excluded.TRUNCATED
    return None


def _trajectory_samples(
    trajectory: Trajectory, by_turn: Sequence[float] | None, excluded: Excluded | None
) -> list[TrainingSample]:
    completion_ids = trajectory.completion_ids
    if by_turn is None:
        by_turn = [0.0] * len(completion_ids)
    if len(by_turn) != len(completion_ids):
        raise ValueError(
            f"trajectory {trajectory.trajectory_id}: {len(by_turn)} advantages for its {len(completion_ids)} turns; "
            "give one for each turn"
        )
    advantage_of = dict(zip(completion_ids, by_turn, strict=True))
    samples: list[TrainingSample] = []
    for stream in trajectory.streams:
        builder = SampleBuilder(trajectory.trajectory_id)
        for segment in stream:
            if segment.source is Source.MODEL:
                assert segment.completion_id is not None
                builder.add_sampled(segment, advantage=advantage_of[segment.completion_id], excluded=excluded)
            else:
                builder.add_context(segment)
        samples.append(builder.build())
    return samples
