"""What is the loss of a micro-batch's trained tokens? Pure functions of tensors `[n]`.

Three probabilities of a token are told apart: sampled (the engine's), old (the trainer's before the first update from a
batch) and current (the trainer's now, with the graph). current / old is the ratio of the surrogate and of its clip;
old / sampled is `train.correction`. What a token's loss is divided by is in its weight, over the **global** batch, so
the loss of a step is a plain sum over micro-batches and processes.

Left out: where advantages come from (`train.advantages`), and where logprobs do (`train.model`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.types import TrainingSample
from train.config import GrpoConfig, LossType
from train.correction import MAX_LOG_RATIO, bounded_exp, engine_correction, kl_estimate, trajectory_sums
from train.loss_metrics import LossTerms, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The trained tokens of a micro-batch, in any order; each field is `[n]`, logprobs are in nats.

    logprobs: current, with the graph.
    old_logprobs: before the first update from the batch; in that update itself `logprobs.detach()`.
    sampled_logprobs: as the engine reported them.
    weights: see `sample_weights`.
    trajectory: which trajectory the token belongs to, counted from 0 in this micro-batch. Where the configuration is
        `sequence_level`, all trained tokens of a trajectory must be in one micro-batch.
    entropies: of the current distributions.
    ref_logprobs: the reference model's; needed where beta > 0.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    sampled_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    trajectory: Tensor
    entropies: Tensor
    ref_logprobs: Tensor | None = None


def sample_weights(
    samples: Sequence[TrainingSample], loss_type: LossType, *, max_trajectory_tokens: int | None = None
) -> list[float]:
    """The weight of each trained token of each sample, over the **global** batch.

    With N trained tokens in R trajectories, of which this one has n (in all its samples together):

    - "dapo", "cispo": 1 / N, every token counts the same (arXiv:2503.14476).
    - "grpo", "rloo": 1 / (R · n), every trajectory counts the same (arXiv:2402.03300). Long wrong answers are punished
      less per token.
    - "dr_grpo": 1 / (R · `max_trajectory_tokens`), a constant: the length has no say (arXiv:2503.20783).

    Only trained tokens count, so tool results, samples of dead groups and failures are in no denominator. All is zero
    where nothing is trained.

    Raises:
        ValueError: "dr_grpo" without `max_trajectory_tokens`.
    """
    trained: Counter[str] = Counter()
    for sample in samples:
        trained[sample.trajectory_id] += sum(sample.loss_mask)
    trajectories = sum(1 for n in trained.values() if n)
    if loss_type == "dr_grpo":
        if max_trajectory_tokens is None:
            raise ValueError("loss_type 'dr_grpo' divides by max_trajectory_tokens (rollout.limits); hand it in")
        divisors = dict.fromkeys(trained, trajectories * max_trajectory_tokens)
    elif loss_type in ("dapo", "cispo"):
        divisors = dict.fromkeys(trained, trained.total())
    else:
        divisors = {name: trajectories * n for name, n in trained.items()}
    return [1.0 / divisors[sample.trajectory_id] if any(sample.loss_mask) else 0.0 for sample in samples]


def policy_loss(tokens: TrainedTokens, config: GrpoConfig) -> LossTerms:
    """The loss of a micro-batch: each token's surrogate times its correction, plus beta times its KL, weighted, summed.

    With the ratio r and the advantage A of a token, the surrogate is

    - clipped, for all loss types but one: min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), of PPO
      (arXiv:1707.06347) with DAPO's two bounds (arXiv:2503.14476);
    - "cispo": min(r, epsilon_high), detached, times A log p: every token keeps a gradient (MiniMax-M1,
      arXiv:2506.13585; the single bound of ScaleRL, arXiv:2510.13786).

    r is the token's own; with importance_sampling_level "sequence" the geometric mean over its trajectory (GSPO,
    arXiv:2507.18071); for "rloo" the product over its trajectory (REINFORCE Leave-One-Out, arXiv:2402.14740). In the
    last two its gradient is taken through the token alone (GSPO's eq. 14), so advantages may differ from token to
    token; where they do not, loss and gradient are those of the trajectory's ratio.

    A token whose logarithm of r is beyond `MAX_LOG_RATIO` gets no gradient from r: it says nothing.

    Three tokens, on policy, with advantages 2, -1 and 1; then with every ratio e^0.5, where the clip takes the first
    and the last:

    >>> advantages, lp = torch.tensor([2.0, -1.0, 1.0]), torch.full((3,), -1.0)
    >>> def loss_of(logprobs):
    ...     return policy_loss(TrainedTokens(
    ...         logprobs=logprobs, old_logprobs=lp, sampled_logprobs=lp, advantages=advantages,
    ...         weights=torch.full((3,), 1 / 3), trajectory=torch.zeros(3, dtype=torch.long),
    ...         entropies=torch.ones(3)), GrpoConfig(epsilon=0.2, epsilon_high=0.28)).loss
    >>> f"{loss_of(lp):.4f} {loss_of(lp + 0.5):.4f} {-(1.28 * 2 - 2.71828**0.5 + 1.28) / 3:.4f}"
    '-0.6667 -0.7304 -0.7304'

    Raises:
        ValueError: beta > 0 and no `ref_logprobs`.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    ratio = bounded_exp(_at_level(log_ratio, tokens.trajectory, config))
    correction = engine_correction(
        tokens.old_logprobs - tokens.sampled_logprobs,
        tokens.trajectory,
        mode=config.vllm_importance_sampling_mode,
        clip_min=config.vllm_importance_sampling_clip_min,
        clip_max=config.vllm_importance_sampling_clip_max,
    )
    if config.loss_type == "cispo":
        surrogate = ratio.detach().clamp(max=config.epsilon_high) * tokens.advantages * tokens.logprobs
    else:
        clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon_high)
        surrogate = torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    losses = -surrogate * correction.weights
    kl = None
    if config.beta > 0:
        if tokens.ref_logprobs is None:
            raise ValueError("beta > 0 needs ref_logprobs: the reference model's logprobs of the same tokens")
        kl = kl_estimate(tokens.ref_logprobs - tokens.logprobs.detach())
        losses = losses + config.beta * _weighted_by_ratio(kl, tokens.logprobs, tokens.ref_logprobs, log_ratio)
    loss = (tokens.weights * losses).sum()
    return measure(
        loss,
        ratio=ratio.detach(),
        advantages=tokens.advantages,
        engine_log_ratio=tokens.old_logprobs - tokens.sampled_logprobs,
        correction=correction,
        trajectory=tokens.trajectory,
        entropies=tokens.entropies,
        kl=kl,
        config=config,
    )


def _at_level(log_ratio: Tensor, trajectory: Tensor, config: GrpoConfig) -> Tensor:
    """The logarithm of each token's ratio `[n]`: its own, or its trajectory's with the gradient through itself."""
    if config.loss_type == "rloo":
        # The weights divide by the trajectory's tokens for the loss to be the trajectory's, so the gradient is
        # multiplied by them: that of a product is the whole ratio at each of its tokens.
        slope, value = trajectory_sums(torch.ones_like(log_ratio), trajectory), log_ratio.detach()
        value = trajectory_sums(value, trajectory)
    elif config.importance_sampling_level == "sequence":
        slope, value = 1.0, log_ratio.detach()
        value = trajectory_sums(value, trajectory) / trajectory_sums(torch.ones_like(value), trajectory)
    else:
        return log_ratio
    return value + slope * (log_ratio - log_ratio.detach())


def _weighted_by_ratio(kl: Tensor, logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor) -> Tensor:
    """current / old times k3, with its derivative, ratio · (current - reference), which is the unbiased gradient of
    KL(current ‖ reference) (DeepSeek-V3.2, arXiv:2512.02556; TRL's `use_bias_correction_kl`). k3 alone, differentiated,
    would have e^(ref - current) in its gradient, which a single token can blow up."""
    with torch.no_grad():
        inside = log_ratio.abs() <= MAX_LOG_RATIO
        ratio = torch.where(inside, bounded_exp(log_ratio), torch.zeros_like(log_ratio))
        slope = (logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ratio * (kl + slope * (logprobs - logprobs.detach()))
