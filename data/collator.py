"""Samples → micro-batches: rows of equal capacity that each hold one or more samples, and back again.

Samples are packed into rows no longer than the longest sample, so attention costs what it costs for one sample, and
little is padding. `position_ids` restart at each sample, which is what keeps samples apart in attention;
models must be called with `use_cache=False`, or transformers ignores the restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.gate import GateError
from data.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a sample lies in a micro-batch: row, and first column."""

    sample: TrainingSample
    row: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes; every tensor is `[R, C]` (rows, columns).

    position_ids: restart at 0 with each sample and in the padding at a row's end.
    loss_mask: True where the token is trained (its logprob is predicted one column earlier).
    sampled_logprobs, advantages: as in the samples; 0 in the padding.
    loss_weights: what a trained token's loss is multiplied with; the loss of a step is the plain sum over all its
        micro-batches and processes, so no split changes it. 0 where not trained.
    """

    token_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    sampled_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    placements: tuple[Placement, ...]

    def to(self, device: torch.device) -> MicroBatch:
        tensors = (
            "token_ids", "position_ids", "loss_mask", "sampled_logprobs", "advantages", "loss_weights",
        )  # fmt: skip
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


def pack(
    samples: Sequence[TrainingSample], weights: Sequence[float], *, max_tokens: int, pad_token_id: int
) -> list[MicroBatch]:
    """Pack samples into micro-batches of at most `max_tokens` tokens, padding included.

    The same samples give the same micro-batches in every process. `weights[i]` is the loss weight of each trained token
    of sample i.

    Raises:
        ValueError: a sample is longer than `max_tokens`.
    """
    if not samples:
        return []
    capacity = max(len(sample) for sample in samples)
    if capacity > max_tokens:
        raise ValueError(f"a sample has {capacity} tokens; raise max_micro_batch_tokens (now {max_tokens})")
    rows = _fill_rows([len(sample) for sample in samples], capacity)
    rows_each = max_tokens // capacity
    return [
        _micro_batch([[(samples[i], weights[i]) for i in row] for row in rows[first : first + rows_each]], pad_token_id)
        for first in range(0, len(rows), rows_each)
    ]


def unpack(batch: MicroBatch) -> list[TrainingSample]:
    """The samples as the tensors hold them now: what the gate reads, so that it checks what is really trained."""
    samples: list[TrainingSample] = []
    for placement in batch.placements:
        columns = slice(placement.start, placement.start + len(placement.sample))
        row = placement.row
        samples.append(
            replace(
                placement.sample,
                token_ids=tuple(batch.token_ids[row, columns].tolist()),
                loss_mask=tuple(batch.loss_mask[row, columns].tolist()),
                sampled_logprobs=tuple(batch.sampled_logprobs[row, columns].tolist()),
                advantages=tuple(batch.advantages[row, columns].tolist()),
            )
        )
    return samples


def trajectory_index(batch: MicroBatch) -> Tensor:
    """Which trajectory each trained token belongs to `[n]`, in the order of `loss_mask`, counted from 0 in this batch;
    the samples of a trajectory have one number."""
    index = torch.zeros(batch.token_ids.shape, dtype=torch.long)
    numbers: dict[str, int] = {}
    for placement in batch.placements:
        number = numbers.setdefault(placement.sample.trajectory_id, len(numbers))
        index[placement.row, placement.start : placement.start + len(placement.sample)] = number
    return index.to(batch.token_ids.device)[batch.loss_mask]


def check_layout(batch: MicroBatch) -> None:
    """The gate's part that only the tensors show: what lies outside the samples, and what keeps them apart.

    Raises:
        GateError: a token of the padding is trained, samples could see each other, or a loss weight is wrong.
    """
    positions = torch.zeros_like(batch.position_ids)
    filled = torch.zeros_like(batch.loss_mask)
    ends = [0] * len(positions)
    for placement in batch.placements:
        columns = slice(placement.start, placement.start + len(placement.sample))
        positions[placement.row, columns] = torch.arange(len(placement.sample))
        filled[placement.row, columns] = True
        ends[placement.row] = max(ends[placement.row], columns.stop)
    for row, end in enumerate(ends):
        positions[row, end:] = torch.arange(positions.shape[1] - end)
    if (batch.loss_mask & ~filled).any():
        raise GateError("gate: a token of the padding is trained")
    if not torch.equal(positions, batch.position_ids):
        raise GateError("gate: position_ids do not restart at each sample: samples of a row would see each other")
    weights = batch.loss_weights
    if not weights.isfinite().all() or (weights != 0)[~batch.loss_mask].any() or (weights <= 0)[batch.loss_mask].any():
        raise GateError("gate: loss_weights must be positive where a token is trained, and 0 elsewhere")


def _fill_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of samples for each row, no row longer than `capacity`.

    >>> _fill_rows([3, 5, 2], 5)
    [[1], [0, 2]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((row for row, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            rows.append([index])
            room.append(capacity - lengths[index])
        else:
            rows[place].append(index)
            room[place] -= lengths[index]
    return rows


def _micro_batch(rows: Sequence[Sequence[tuple[TrainingSample, float]]], pad_token_id: int) -> MicroBatch:
    columns = max(sum(len(sample) for sample, _ in row) for row in rows)
    shape = (len(rows), columns)
    token_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    position_ids = torch.zeros(shape, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    sampled_logprobs, advantages, loss_weights = (torch.zeros(shape) for _ in range(3))
    placements: list[Placement] = []
    for index, row in enumerate(rows):
        start = 0
        for sample, weight in row:
            span = slice(start, start + len(sample))
            token_ids[index, span] = torch.tensor(sample.token_ids)
            position_ids[index, span] = torch.arange(len(sample))
            loss_mask[index, span] = torch.tensor(sample.loss_mask)
            sampled_logprobs[index, span] = torch.tensor(sample.sampled_logprobs)
            advantages[index, span] = torch.tensor(sample.advantages)
            loss_weights[index, span] = weight * loss_mask[index, span]
            placements.append(Placement(sample=sample, row=index, start=start))
            start += len(sample)
        # The padding is a sample of its own, so that it can see nobody and nobody sees it.
        position_ids[index, start:] = torch.arange(columns - start)
    return MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        loss_mask=loss_mask,
        sampled_logprobs=sampled_logprobs,
        advantages=advantages,
        loss_weights=loss_weights,
        placements=tuple(placements),
    )
