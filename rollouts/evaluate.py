"""Evaluation: several attempts at held-out tasks; success, pass@k and pass^k with unbiased estimators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollouts.summary import summarise
from rollouts.types import TrajectoryGroup, is_success

ENOUGH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of `attempts` attempts at each task.

    counts: task id → (successes, graded attempts); attempts that our machinery lost are not graded.
    success: mean over tasks of the share of successes.
    pass_at_k, pass_hat_k: by k, each the mean over the tasks that have k graded attempts or more; a k that fewer than
        nine of ten tasks have is left out.
    """

    attempts: int
    tasks: int
    success: float
    success_stderr: float
    pass_at_k: dict[int, float]
    pass_hat_k: dict[int, float]
    counts: dict[str, tuple[int, int]]
    summary: dict[str, float]


def summarise_groups(groups: Sequence[TrajectoryGroup], *, attempts: int) -> Evaluation:
    """Groups of attempts → figures. A reward of 1 or more is a success.

    Raises:
        ValueError: no attempt was graded.
    """
    counts: dict[str, tuple[int, int]] = {}
    for group in groups:
        rewards = [t.usable_reward for t in group.trajectories if t.usable_reward is not None]
        counts[group.task.task_id] = (sum(is_success(reward) for reward in rewards), len(rewards))
    graded = [(successes, n) for successes, n in counts.values() if n]
    if not graded:
        causes = sorted({trajectory.cause for group in groups for trajectory in group.trajectories})
        raise ValueError(f"no attempt could be graded: {causes[0]}")
    ks = [k for k in (1, 2, 4, 8, 16, 32) if sum(n >= k for _, n in graded) >= ENOUGH * len(graded)]
    shares = [successes / n for successes, n in graded]
    mean = sum(shares) / len(shares)
    spread = math.sqrt(sum((share - mean) ** 2 for share in shares) / max(1, len(shares) - 1))
    return Evaluation(
        attempts=attempts,
        tasks=len(graded),
        success=mean,
        success_stderr=spread / math.sqrt(len(shares)),
        pass_at_k={k: _mean_over_tasks(pass_at_k, graded, k) for k in ks},
        pass_hat_k={k: _mean_over_tasks(pass_hat_k, graded, k) for k in ks},
        counts=counts,
        summary=summarise(
            [trajectory for group in groups for trajectory in group.trajectories],
            [trajectory for group in groups for trajectory in group.lost],
        ),
    )


def _mean_over_tasks(estimate: Callable[[int, int, int], float], graded: Sequence[tuple[int, int]], k: int) -> float:
    values = [estimate(n, c, k) for c, n in graded if n >= k]
    return sum(values) / len(values)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k attempts succeeds, from c successes in n >= k attempts; the unbiased
    estimator of Chen et al. 2021 (arXiv:2107.03374): 1 - C(n-c, k) / C(n, k).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Probability that all of k attempts succeed; the unbiased estimator of tau-bench (arXiv:2406.12045):
    C(c, k) / C(n, k).

    >>> pass_hat_k(4, 3, 2)
    0.5
    """
    return math.comb(c, k) / math.comb(n, k)
