"""Trajectories → numbers: what a step's or an evaluation's sampling looked like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from data.types import Source
from rollouts.types import Trajectory


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the trajectories that have a reward (infrastructure failures are only counted).

    `length` is in tokens that the policy sampled; tool tokens never count. A reward term is averaged over the
    trajectories that have it: an environment may grade tasks of several kinds.
    """
    graded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    results = [result for trajectory in graded for turn in trajectory.turns for result in turn.tool_results]
    row: dict[str, float] = {
        "trajectories": len(trajectories),
        "trajectories/failed": len(trajectories) - len(graded),
        "reward/mean": _mean([trajectory.reward or 0.0 for trajectory in graded]),
        "length/mean": _mean([sampled_tokens(trajectory) for trajectory in graded]),
        "turns/mean": _mean([len(trajectory.turns) for trajectory in graded]),
        "tools/calls": len(results),
        "tools/errors": sum(result.is_error for result in results),
        "control_tokens/forged": sum(trajectory.forged for trajectory in trajectories),
    }
    for name in sorted({name for trajectory in graded for name in trajectory.reward_terms}):
        row[f"reward/{name}"] = _mean([t.reward_terms[name] for t in graded if name in t.reward_terms])
    stops = Counter(trajectory.stop_reason.value for trajectory in trajectories)
    return row | {f"stop/{reason}": count / len(trajectories) for reason, count in sorted(stops.items())}


def sampled_tokens(trajectory: Trajectory) -> int:
    """How many tokens the policy sampled."""
    return sum(
        len(segment.token_ids) for stream in trajectory.streams for segment in stream if segment.source is Source.MODEL
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
