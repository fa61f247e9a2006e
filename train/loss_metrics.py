"""What does a micro-batch tell about the update? Sums and maxima that add up over micro-batches and processes, and are
divided once, at the end: no split changes a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.collator import MicroBatch, columns_of
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


def loss_metrics(sums: Sequence[float], largest: Sequence[tuple[float, str]], config: GrpoConfig) -> dict[str, Any]:
    """The metrics of an update from the sums `[len(SUMS)]` and `peaks` over all its micro-batches and processes.

    Those of the reference are there where beta > 0; those of the correction where there is one; the share of
    trajectories where it is for trajectories, since a token mode may find a trajectory in two micro-batches.
    """
    total = dict(zip(SUMS, sums, strict=True))
    peak = dict(zip(MAXIMA, largest, strict=True))
    n = max(total["tokens"], 1.0)
    row: dict[str, Any] = {
        "loss": total["loss"],
        "entropy": total["entropy"] / n,
        "clip_ratio": (total["clipped_low"] + total["clipped_high"]) / n,
        "clip_ratio/low": total["clipped_low"] / n,
        "clip_ratio/high": total["clipped_high"] / n,
        "ratio/mean": total["ratio"] / n,
        "ratio/max": peak["ratio/max"][0],
        "logprob_gap/mean": total["gap"] / n,
        "logprob_gap/max": peak["logprob_gap/max"][0],
        "logprob_gap/max_token": peak["logprob_gap/max"][1],
        "logprob_gap/kl": total["gap_kl"] / n,
    }
    if config.beta > 0:
        value, token = peak["kl/max"]
        row |= {"kl/mean": total["kl"] / n, "kl/max": value, "kl/max_token": token}
    mode = config.vllm_importance_sampling_mode
    if mode != "none":
        # Kish's: how many tokens of equal weight say as much as these do.
        effective = total["weight"] ** 2 / total["weight_squared"] if total["weight_squared"] else 0.0
        row |= {"correction/tokens": total["corrected"] / n, "correction/effective": effective / n}
    if mode.startswith("sequence"):
        row["correction/trajectories"] = total["trajectories_corrected"] / max(total["trajectories"], 1.0)
    return row


def peaks(found: Sequence[tuple[LossTerms, MicroBatch]]) -> list[tuple[float, str]]:
    """For each of `MAXIMA` the largest value over this process's micro-batches, and which token it is at."""
    values = [terms.maxima.tolist() for terms, _ in found]
    best: list[tuple[float, str]] = []
    for number in range(len(MAXIMA)):
        at = max(range(len(found)), key=lambda i: _rank(values[i][number]), default=None)
        if at is None or _rank(values[at][number]) == (False, 0.0):
            best.append((0.0, ""))
        else:
            terms, batch = found[at]
            best.append((values[at][number], name_token(batch, int(terms.where[number]))))
    return best


def worst_peaks(found: Sequence[Sequence[tuple[float, str]]]) -> list[tuple[float, str]]:
    """The `peaks` of all processes in one."""
    return [max(column, key=lambda peak: _rank(peak[0])) for column in zip(*found, strict=True)]


def _rank(value: float) -> tuple[bool, float]:
    """NaN is worse than any number."""
    return (True, 0.0) if math.isnan(value) else (False, value)


def mean_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of a step from those of its updates: means; of a maximum the maximum, and the token that it is at.

    >>> first = {"loss": 1.0, "kl/max": 2.0, "kl/max_token": "a"}
    >>> mean_metrics([first, {"loss": 2.0, "kl/max": 5.0, "kl/max_token": "b"}])
    {'loss': 1.5, 'kl/max': 5.0, 'kl/max_token': 'b'}
    """
    step: dict[str, Any] = {}
    for name in rows[0]:
        if name.endswith(("/max", "/max_token")):
            step[name] = max(rows, key=lambda row: row[name.removesuffix("_token")])[name]
        else:
            step[name] = sum(row[name] for row in rows) / len(rows)
    return step


def name_token(batch: MicroBatch, index: int) -> str:
    """Which token is the batch's trained token number `index`, for a person: trajectory, completion, place in it."""
    column = int(batch.loss_mask.nonzero()[index])
    for placement in batch.placements:
        sample = placement.sample
        for position in (columns_of(batch, placement) == column).nonzero().flatten().tolist():
            completion = sample.completion_ids[sample.completion_index[position]]
            return f"{sample.trajectory_id}: {completion}[{sample.completion_position[position]}]"
    raise AssertionError(f"column {column} is in no sample")
