"""Rewards of a group → advantages, one for each trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float | None], *, scale_rewards: bool) -> list[float | None]:
    """The group baseline of GRPO (Shao et al. 2024, arXiv:2402.03300): reward minus the group's mean.

    Args:
        rewards: one for each trajectory; None (no reward: infrastructure failed) stays None and is in no mean.
        scale_rewards: divide by the group's standard deviation (unbiased, as TRL's `scale_rewards="group"`); False is
            Dr. GRPO's choice (arXiv:2503.20783).

    A group whose rewards are all equal (up to rounding), or that has only one, is dead: exactly zero everywhere.

    >>> group_advantages([1.0, 0.0, None], scale_rewards=False)
    [0.5, -0.5, None]
    """
    known = [reward for reward in rewards if reward is not None]
    # 0.1 + 0.2 and 0.3 are one reward. Above 1000, rounding is more than the absolute tolerance.
    if not known or math.isclose(max(known), min(known), rel_tol=1e-12, abs_tol=1e-9):
        return [None if reward is None else 0.0 for reward in rewards]
    # Divided before the sum, and hypot: neither can overflow for a huge reward.
    mean = math.fsum(reward / len(known) for reward in known)
    scale = 1.0
    if scale_rewards:
        # The same small number as TRL's keeps a nearly constant group finite.
        scale = math.hypot(*(reward - mean for reward in known)) / math.sqrt(len(known) - 1) + 1e-4
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
