"""What does a micro-batch tell about the update? Sums and maxima that add up over micro-batches and processes, and are
divided once, at the end: no split changes a metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.collator import MicroBatch
from train.config import GrpoConfig
from train.correction import Correction, kl_estimate, trajectory_sums

SUMS = (
    "loss", "tokens", "entropy", "ratio", "clipped_low", "clipped_high", "gap", "gap_kl", "corrected",
    "trajectories", "trajectories_corrected", "weight", "weight_squared", "kl",
)  # fmt: skip
MAXIMA = ("ratio/max", "logprob_gap/max", "kl/max")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What `train.loss.policy_loss` returns.

    loss: scalar with graph; the step's loss is the sum over its micro-batches and processes.
    sums: `[len(SUMS)]` float64, to be added up.
    maxima: `[len(MAXIMA)]` float64, of which the largest counts; 0 where there is no token.
    where: `[len(MAXIMA)]`, which of the micro-batch's trained tokens each maximum is at; -1 where there is none.
    """

    loss: Tensor
    sums: Tensor
    maxima: Tensor
    where: Tensor

    def total(self, name: str) -> float:
        """One of the sums or maxima, by name."""
        return (self.sums[SUMS.index(name)] if name in SUMS else self.maxima[MAXIMA.index(name)]).item()


@torch.no_grad()
def measure(
    loss: Tensor,
    *,
    ratio: Tensor,
    advantages: Tensor,
    engine_log_ratio: Tensor,
    correction: Correction,
    trajectory: Tensor,
    entropies: Tensor,
    kl: Tensor | None,
    config: GrpoConfig,
) -> LossTerms:
    """The terms of a micro-batch; nothing is read back from the device here. All tensors are `[n]`: `engine_log_ratio`
    is old - sampled (nats), `kl` each token's estimate of KL(current ‖ reference)."""
    ones = torch.ones_like(ratio)
    if config.loss_type == "cispo":
        low, high = torch.zeros_like(ratio), (ratio > config.epsilon_high) & (advantages != 0)
    else:
        low = (ratio < 1 - config.epsilon) & (advantages < 0)
        high = (ratio > 1 + config.epsilon_high) & (advantages > 0)
    gap = engine_log_ratio.abs()
    share = ones / trajectory_sums(ones, trajectory)  # adds up to the number of trajectories
    columns = {
        "tokens": ones, "entropy": entropies, "ratio": ratio, "clipped_low": low, "clipped_high": high, "gap": gap,
        "gap_kl": kl_estimate(engine_log_ratio), "corrected": correction.out_of_bounds, "trajectories": share,
        "trajectories_corrected": share * correction.out_of_bounds, "weight": correction.weights,
        "weight_squared": correction.weights.square(), "kl": torch.zeros_like(ratio) if kl is None else kl,
    }  # fmt: skip
    sums = [loss.double() if name == "loss" else columns[name].double().sum() for name in SUMS]
    peaks = torch.stack([ratio, gap, columns["kl"]]).double()
    if not ratio.numel():
        peaks = peaks.new_zeros((len(MAXIMA), 1))
    maxima, where = peaks.max(dim=1)
    return LossTerms(
        loss=loss,
        sums=torch.stack(sums),
        maxima=maxima,
        where=where if ratio.numel() else torch.full_like(where, -1),
    )


def loss_metrics(sums: Sequence[float], maxima: Sequence[float], config: GrpoConfig) -> dict[str, float]:
    """The metrics of an update from the sums `[len(SUMS)]` and maxima `[len(MAXIMA)]` over all its micro-batches.

    Those of the reference are there where beta > 0; those of the correction where there is one; the share of
    trajectories where it is for trajectories, since a token mode may find a trajectory in two micro-batches.
    """
    total = dict(zip(SUMS, sums, strict=True))
    largest = dict(zip(MAXIMA, maxima, strict=True))
    n = max(total["tokens"], 1.0)
    row = {
        "loss": total["loss"],
        "entropy": total["entropy"] / n,
        "clip_ratio": (total["clipped_low"] + total["clipped_high"]) / n,
        "clip_ratio/low": total["clipped_low"] / n,
        "clip_ratio/high": total["clipped_high"] / n,
        "ratio/mean": total["ratio"] / n,
        "ratio/max": largest["ratio/max"],
        "logprob_gap/mean": total["gap"] / n,
        "logprob_gap/max": largest["logprob_gap/max"],
        "logprob_gap/kl": total["gap_kl"] / n,
    }
    if config.beta > 0:
        row |= {"kl/mean": total["kl"] / n, "kl/max": largest["kl/max"]}
    mode = config.vllm_importance_sampling_mode
    if mode != "none":
        # Kish's: how many tokens of equal weight say as much as these do.
        effective = total["weight"] ** 2 / total["weight_squared"] if total["weight_squared"] else 0.0
        row |= {"correction/tokens": total["corrected"] / n, "correction/effective": effective / n}
    if mode.startswith("sequence"):
        row["correction/trajectories"] = total["trajectories_corrected"] / max(total["trajectories"], 1.0)
    return row


def name_token(batch: MicroBatch, index: int) -> str:
    """Which token is the batch's trained token number `index`, for a person: trajectory, completion, place in it."""
    row, column = (int(place) for place in batch.loss_mask.nonzero()[index])
    for placement in batch.placements:
        sample, position = placement.sample, column - placement.start
        if placement.row == row and 0 <= position < len(sample):
            completion = sample.completion_ids[sample.completion_index[position]]
            return f"{sample.trajectory_id}: {completion}[{sample.completion_position[position]}]"
    raise AssertionError(f"row {row}, column {column} is in no sample")
