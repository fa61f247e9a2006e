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

    A group whose rewards are all equal, or that has only one, is dead: exactly zero everywhere.

    >>> group_advantages([1.0, 0.0, None], scale_rewards=False)
    [0.5, -0.5, None]
    """
    known = [reward for reward in rewards if reward is not None]
    if not known or max(known) == min(known):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(known) / len(known)
    scale = 1.0
    if scale_rewards:
        # The same small number as TRL's keeps a nearly constant group finite.
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1)) + 1e-4
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
