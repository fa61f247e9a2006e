"""Rewards of a step → advantages, one for each turn of each trajectory.

A trajectory is known by its id and a group by its `group_id`; the order of either means nothing.

Of a trajectory with the turns 0 … K-1, which earned r_0 … r_(K-1), and with an outcome (all other reward terms, paid
when it ended), turn k's return is what was still to come:

    G_k = sum over j >= k of discount^(j-k) · r_j  +  discount^(K-1-k) · outcome

Turn k is compared with turn k of the others. One that had ended by then counts with its last turn's return, so every
baseline counts each trajectory once. With `discount` 1 and no rewards of turns all G_k are the reward, and every turn
has GRPO's advantage of the outcome.

Turn rewards as returns-to-go, compared turn by turn: the process supervision of GRPO (Shao et al. 2024,
arXiv:2402.03300, section 4.1.3), with the mean taken over the trajectories of the same turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from data.types import TrainingSample
from rollouts.samples import gives_no_gradient
from rollouts.types import Trajectory, TrajectoryGroup
from train.config import Baseline, GrpoConfig, ScaleRewards

SMALLEST_SCALE = 1e-4
"""TRL's: it keeps a nearly constant group finite."""


def step_advantages(trajectories: Sequence[Trajectory], config: GrpoConfig) -> dict[str, tuple[float, ...]]:
    """The advantages of all trajectories of a step, by trajectory id, one for each turn `[turns]`.

    Those without a usable reward (our machinery failed, or the reward is None or no finite number) are left out, and
    are in no mean and no scale. A group is dead when all its advantages are zero, which they are exactly where they
    would be zero but for rounding; so is a group of which one trajectory alone is left, unless the baseline is the
    batch's.

    Raises:
        ValueError: two trajectories have the same id.
    """
    returns: dict[str, tuple[float, ...]] = {}
    groups: dict[str, list[str]] = {}
    turns: dict[str, int] = {}
    for trajectory in trajectories:
        name = trajectory.trajectory_id
        if name in turns:
            raise ValueError(f"two trajectories have the id {name}; give each attempt its own")
        turns[name] = len(trajectory.completion_ids)
        reward = trajectory.usable_reward
        if reward is not None:
            returns[name] = _returns(trajectory, reward, config)
            groups.setdefault(trajectory.group_id, []).append(name)
    found: dict[str, list[float]] = {name: [] for name in returns}
    for turn in range(max(map(len, returns.values()), default=0)):
        at_turn = {name: values[min(turn, len(values) - 1)] for name, values in returns.items()}
        batch = Spread.of(list(at_turn.values()))
        for names in groups.values():
            values = [at_turn[name] for name in names]
            column = group_advantages(values, batch=batch, baseline=config.baseline, scale_rewards=config.scale_rewards)
            for name, advantage in zip(names, column, strict=True):
                if turn < turns[name]:
                    found[name].append(advantage)
    return {name: tuple(values) for name, values in found.items()}


def is_dead(group: TrajectoryGroup, config: GrpoConfig) -> bool:
    """Whether it is certain, before the other groups of its step are there, that no turn of a group will have an
    advantage."""
    advantages = step_advantages(group.trajectories, config)
    if config.baseline == "batch":
        return not advantages  # what is compared with the step may differ from it
    return gives_no_gradient(group, advantages)


def _returns(trajectory: Trajectory, reward: float, config: GrpoConfig) -> tuple[float, ...]:
    outcome = reward - math.fsum(trajectory.turn_rewards)
    if trajectory.stop_reason.is_truncated:
        outcome += config.truncation_penalty
    return turn_returns(
        trajectory.turn_rewards, outcome, turns=len(trajectory.completion_ids), discount=config.discount
    )


def turn_returns(
    turn_rewards: Sequence[float], outcome: float, *, turns: int, discount: float = 1.0
) -> tuple[float, ...]:
    """What was still to come at each turn, `[turns]`; see the module. A trajectory without a turn has the outcome.

    Args:
        turn_rewards: one for each turn, or none at all.
        outcome: paid at the end of the last turn.
        discount: of one turn (gamma); 1 counts what comes late as much as what comes now.

    >>> turn_returns([0.0, 0.5, 0.0], 1.0, turns=3)
    (1.5, 1.5, 1.0)
    >>> turn_returns([], 1.0, turns=3, discount=0.5)
    (0.25, 0.5, 1.0)
    """
    earned = list(turn_rewards) or [0.0] * max(1, turns)
    earned[-1] += outcome
    for turn in reversed(range(len(earned) - 1)):
        earned[turn] += discount * earned[turn + 1]
    return tuple(earned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and standard deviation (unbiased) of some returns."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Those of at least one value. Divided before the sum, and hypot: neither can overflow for huge rewards."""
        mean = math.fsum(value / len(values) for value in values)
        deviation = math.hypot(*(value - mean for value in values))
        return cls(mean=mean, std=deviation / math.sqrt(max(1, len(values) - 1)))


def group_advantages(
    values: Sequence[float],
    *,
    batch: Spread | None = None,
    baseline: Baseline = "group",
    scale_rewards: ScaleRewards = "group",
) -> list[float]:
    """The returns `[n]` of one group at one turn → their advantages `[n]`.

    Args:
        batch: of all groups of the step; None: there is no other group.
        baseline: what is subtracted. "group": the group's mean (GRPO, arXiv:2402.03300). "leave_one_out": the mean of
            the others (RLOO, arXiv:2402.14740). "batch": the mean of the step (REINFORCE++, arXiv:2501.03262).
        scale_rewards: what the difference is divided by. "group": the group's standard deviation (GRPO). "batch": that
            of the step (REINFORCE++; arXiv:2508.08221). "none": nothing (Dr. GRPO, arXiv:2503.20783).

    What differs from the baseline by rounding alone is exactly zero: 0.1 + 0.2 and 0.3 are one reward. So is the only
    value of a group, unless the baseline is the batch's.

    >>> group_advantages([1.0, 0.0, 0.5], scale_rewards="none")
    [0.5, -0.5, 0.0]
    >>> group_advantages([1.0, 0.0, 0.5], baseline="leave_one_out", scale_rewards="none")
    [0.75, -0.75, 0.0]
    >>> group_advantages([1.0, 0.0, 0.5], batch=Spread(mean=0.25, std=1.0), baseline="batch", scale_rewards="none")
    [0.75, -0.25, 0.25]
    """
    if not values:
        return []
    own = Spread.of(values)
    step = own if batch is None else batch
    mean = step.mean if baseline == "batch" else own.mean
    scale = {"group": own.std + SMALLEST_SCALE, "batch": step.std + SMALLEST_SCALE, "none": 1.0}[scale_rewards]
    if baseline == "leave_one_out" and len(values) > 1:
        # v - mean of the others = (v - mean of all) · n / (n - 1)
        scale *= (len(values) - 1) / len(values)
    return [0.0 if _is_rounding(value, mean) else (value - mean) / scale for value in values]


def _is_rounding(value: float, mean: float) -> bool:
    """Above 1000, rounding is more than the absolute tolerance."""
    return math.isclose(value, mean, rel_tol=1e-12, abs_tol=1e-9)


def advantage_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Over the trained tokens of a step: mean, mean size and largest size of their advantages; zeros without any."""
    values = [
        advantage
        for sample in samples
        for advantage, trained in zip(sample.advantages, sample.loss_mask, strict=True)
        if trained
    ]
    sizes = [abs(value) for value in values]
    count = max(1, len(values))
    return {
        "advantages/mean": math.fsum(values) / count,
        "advantages/abs": math.fsum(sizes) / count,
        "advantages/max": max(sizes, default=0.0),
    }
