"""How much does a token count that the engine and the trainer give different probabilities?

The engine computes in another precision and with other kernels, and a trajectory may have been sampled by weights of
some steps ago. Both are in one ratio, the trainer's probability before the update over the engine's (old / sampled). It
weighs the loss of a token or a trajectory, truncated or masked where it is out of bounds, so that a few tokens cannot
carry a step. What moves *during* an update (current / old) is the clip's concern, in `train.loss`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.config import CorrectionMode

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios (nats) are cut here before they are exponentiated: exp(89) is infinite in float32, and infinite
times zero is NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One entry for each trained token `[n]`, without graph.

    weights: what the token's surrogate is multiplied with; 0 where it is masked as off-policy.
    out_of_bounds: True where the ratio was truncated or masked; of a whole trajectory in the sequence modes.
    """

    weights: Tensor
    out_of_bounds: Tensor


@torch.no_grad()
def engine_correction(
    log_ratio: Tensor, trajectory: Tensor, *, mode: CorrectionMode, clip_min: float, clip_max: float
) -> Correction:
    """The importance weights between engine and trainer, as TRL's `vllm_importance_sampling_mode`.

    Truncated importance sampling clamps the ratio to the bounds (TIS: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"); masked importance sampling (MIS, IcePop) drops what is outside. The
    sequence modes take one ratio for each trajectory, over all its tokens: exp of the summed logarithms.

    Args:
        log_ratio: old - sampled logprobs `[n]` (nats).
        trajectory: `[n]`, which trajectory each token belongs to, counted from 0 in this micro-batch. For the sequence
            modes all trained tokens of a trajectory must be here.
        clip_min, clip_max: bounds of the ratio, both allowed values themselves; 0 bounds nothing, nor does 1e9.

    Three tokens of one trajectory with ratios 1, 4 and 1/4:

    >>> gap, together = torch.tensor([1.0, 4.0, 0.25]).log(), torch.zeros(3, dtype=torch.long)
    >>> def weights(mode, low=0.0):
    ...     return engine_correction(gap, together, mode=mode, clip_min=low, clip_max=3.0).weights.tolist()
    >>> weights("token_truncate"), weights("token_mask"), weights("token_mask", 0.5), weights("sequence_mask")
    ([1.0, 3.0, 0.25], [1.0, 0.0, 0.25], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    """
    if mode == "none":
        return Correction(weights=torch.ones_like(log_ratio), out_of_bounds=torch.zeros_like(trajectory).bool())
    if mode.startswith("sequence"):
        log_ratio = trajectory_sums(log_ratio, trajectory)
    ratio = bounded_exp(log_ratio)
    out_of_bounds = (ratio < clip_min) | (ratio > clip_max)
    if mode.endswith("truncate"):
        weights = ratio.clamp(clip_min, clip_max)
    else:
        weights = ratio.masked_fill(out_of_bounds, 0.0)
    return Correction(weights=weights, out_of_bounds=out_of_bounds)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, with no gradient and a finite value where the logarithm is further from 0 than `MAX_LOG_RATIO`."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """k3 of KL(p ‖ q) at tokens drawn from p `[n]` (nats), from log q - log p: never negative, and right on average
    (Schulman 2020, "Approximating KL divergence"). Beyond `MAX_LOG_RATIO` the logarithm is cut, so it stays finite.

    >>> [round(k3, 4) for k3 in kl_estimate(torch.tensor([0.0, -1.0, 1.0])).tolist()]
    [0.0, 0.3679, 0.7183]
    """
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # For a small d, e^d - d - 1 would be rounding alone.
    return (log_ratio.expm1() - log_ratio).clamp(min=0)


def trajectory_sums(values: Tensor, trajectory: Tensor) -> Tensor:
    """For each token the sum `[n]` over its trajectory, added up in float64.

    >>> trajectory_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])).tolist()
    [5.0, 2.0, 5.0]
    """
    # There are no more trajectories than tokens, so no index has to be read back from the device.
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    return sums.index_add(0, trajectory, values.double())[trajectory].to(values.dtype)
