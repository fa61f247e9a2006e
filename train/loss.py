"""The GRPO loss on sampled tokens: pure functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from data.types import TrainingSample

LossType = Literal["grpo", "dapo"]

MAX_LOG_RATIO = 20.0
"""A token further than this from what was sampled (nats) gets no gradient: its ratio says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Sums over a micro-batch's trained tokens `[n]`; divide by the step's totals for means.

    loss: scalar with graph; the step's loss is the sum over its micro-batches.
    clipped: how many tokens the clip took the gradient from.
    logprob_gap: sum and maximum of |current - sampled| (nats).
    """

    loss: Tensor
    clipped: float
    logprob_gap_sum: float
    logprob_gap_max: float


def sample_weights(samples: Sequence[TrainingSample], loss_type: LossType) -> list[float]:
    """The weight of each trained token of each sample, over the **global** batch.

    "dapo": every trained token of the batch counts the same (arXiv:2503.14476), 1 / N. "grpo": every trajectory counts
    the same (arXiv:2402.03300), 1 / (trajectories · its own trained tokens). Samples without a trained token (dead
    groups, failures) are in no denominator.
    """
    trained = [sum(sample.loss_mask) for sample in samples]
    if loss_type == "dapo":
        return [1.0 / sum(trained) if n else 0.0 for n in trained]
    rows = sum(1 for n in trained if n)
    return [1.0 / (rows * n) if n else 0.0 for n in trained]


def grpo_loss(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
) -> LossTerms:
    """The clipped surrogate (arXiv:1707.06347 with DAPO's two bounds), weighted and summed; all arguments are `[n]`.

    The ratio is the trainer's probability over the one that the engine really sampled with, so the clip also bounds
    what a difference between the two can do.

    >>> one = torch.ones(1)
    >>> grpo_loss(-one, -one, 2 * one, one, epsilon=0.2, epsilon_high=0.2).loss.item()
    -2.0
    """
    log_ratio = logprobs - sampled_logprobs
    # exp of more overflows float32, and then the gradient is NaN even where the clip takes the token out.
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    unclipped = ratio * advantages
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high) * advantages
    with torch.no_grad():
        gap = log_ratio.detach().abs()
    return LossTerms(
        loss=-(weights * torch.minimum(unclipped, clipped)).sum(),
        clipped=(clipped < unclipped).sum().item(),
        logprob_gap_sum=gap.sum().item(),
        logprob_gap_max=gap.max().item() if gap.numel() else 0.0,
    )
