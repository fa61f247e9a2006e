"""Samples → micro-batches: one row each, without padding, in which samples share their beginnings; and back again.

A row is made of pieces (`data.prefix_tree`): what samples have in common is there once, and its hidden states serve all
of them. `train.tree_attention` lets each piece see its ancestors and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.gate import GateError
from data.packing import distribute
from data.prefix_tree import Piece, PrefixTree, grow_tree, piece_path
from data.types import TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a sample lies in a micro-batch: its pieces, by number, its beginning first."""

    sample: TrainingSample
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes; every tensor is `[C]` (columns of the one row).

    token_ids: in pieces; what samples share is there once.
    position_ids: counted along each sample, so they go on from piece to piece.
    previous: the column of the token before, whose hidden state predicts this one; -1 for the first of a sample.
    loss_mask: True where the token is trained. No token that several samples share is.
    sampled_logprobs, advantages: as in the samples; 0 where not trained.
    loss_weights: what a trained token's loss is multiplied with; the loss of a step is the plain sum over all its
        micro-batches and processes, so no split changes it. 0 where not trained.

    Two samples with the prompt `7 8` and the answers `4` and `5 2`:

        token_ids     [ 7, 8, 4, 5, 2]
        position_ids  [ 0, 1, 2, 2, 3]
        previous      [-1, 0, 1, 1, 3]
        loss_mask     [ F, F, T, T, T]
        pieces        columns 0 and 1; column 2 (parent 0); columns 3 and 4 (parent 0)
    """

    token_ids: Tensor
    position_ids: Tensor
    previous: Tensor
    loss_mask: Tensor
    sampled_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    pieces: tuple[Piece, ...]
    placements: tuple[Placement, ...]

    def to(self, device: torch.device) -> MicroBatch:
        tensors = (
            "token_ids", "position_ids", "previous", "loss_mask", "sampled_logprobs", "advantages", "loss_weights",
        )  # fmt: skip
        return replace(self, **{name: getattr(self, name).to(device) for name in tensors})


def pack(
    samples: Sequence[TrainingSample],
    weights: Sequence[float],
    *,
    max_tokens: int,
    processes: int = 1,
    whole_trajectories: bool = False,
    attention_cost: float = 0.0,
) -> list[MicroBatch]:
    """Pack samples into micro-batches of at most `max_tokens` computed tokens; see `data.packing.distribute`.

    `weights[i]` is the loss weight of each trained token of sample i. Micro-batch i is for process i % `processes`; an
    empty one has a single token, which is not trained: a process that computes it takes part and changes nothing.

    Raises:
        ValueError: a sample, or what must stay together, is longer than `max_tokens`.
    """
    batches = distribute(
        samples,
        max_tokens=max_tokens,
        processes=processes,
        whole_trajectories=whole_trajectories,
        attention_cost=attention_cost,
    )
    return [_micro_batch([samples[i] for i in batch], [weights[i] for i in batch]) for batch in batches]


def columns_of(batch: MicroBatch, placement: Placement) -> Tensor:
    """The columns `[L]` that hold a sample's tokens, on the CPU."""
    return torch.cat([torch.arange(batch.pieces[i].start, batch.pieces[i].stop) for i in placement.path])


def unpack(batch: MicroBatch) -> list[TrainingSample]:
    """The samples as the tensors hold them now: what the gate reads, so that it checks what is really trained."""
    samples: list[TrainingSample] = []
    for placement in batch.placements:
        columns = columns_of(batch, placement)
        samples.append(
            replace(
                placement.sample,
                token_ids=tuple(batch.token_ids[columns].tolist()),
                loss_mask=tuple(batch.loss_mask[columns].tolist()),
                sampled_logprobs=tuple(batch.sampled_logprobs[columns].tolist()),
                advantages=tuple(batch.advantages[columns].tolist()),
            )
        )
    return samples


def trajectory_index(batch: MicroBatch) -> Tensor:
    """Which trajectory each trained token belongs to `[n]`, in the order of `loss_mask`, counted from 0 in this batch;
    the samples of a trajectory have one number."""
    index = torch.zeros(batch.token_ids.shape, dtype=torch.long)
    numbers: dict[str, int] = {}
    for placement in batch.placements:
        index[columns_of(batch, placement)] = numbers.setdefault(placement.sample.trajectory_id, len(numbers))
    return index.to(batch.token_ids.device)[batch.loss_mask]


def check_layout(batch: MicroBatch) -> None:
    """The gate's part that only the tensors show: what lies outside the samples, what they share, what keeps them
    apart.

    Raises:
        GateError: a sample would see other tokens than its own, at other places; a token is trained that belongs to no
            sample or to several, or that nothing predicts; or a loss weight is wrong.
    """
    _check_pieces(batch)
    owners = torch.zeros(len(batch.token_ids), dtype=torch.long)
    for placement in batch.placements:
        columns = columns_of(batch, placement)
        owners[columns] += 1
        _check_path(batch, placement, columns)
    if batch.placements and (owners == 0).any():
        raise GateError(f"gate: column {int((owners == 0).nonzero()[0])} of a micro-batch belongs to no sample")
    wrong = batch.loss_mask & (owners != 1)
    if wrong.any():
        column = int(wrong.nonzero()[0])
        whose = f"{int(owners[column])} samples share" if owners[column] else "belongs to no sample"
        raise GateError(f"gate: the token in column {column} is trained, which {whose}")
    if (batch.loss_mask & (batch.previous < 0)).any():
        raise GateError("gate: the first token of a sample is trained, and nothing predicts it")
    weights = batch.loss_weights
    if not weights.isfinite().all() or (weights != 0)[~batch.loss_mask].any() or (weights <= 0)[batch.loss_mask].any():
        raise GateError("gate: loss_weights must be positive where a token is trained, and 0 elsewhere")


def _check_pieces(batch: MicroBatch) -> None:
    """The pieces are the row, without gap or overlap, and each continues an earlier one."""
    end = 0
    for number, piece in enumerate(batch.pieces):
        if piece.start != end or piece.stop <= end or not (piece.parent is None or 0 <= piece.parent < number):
            raise GateError(f"gate: piece {number} of a micro-batch does not continue the row: {piece}")
        end = piece.stop
    if end != len(batch.token_ids):
        raise GateError(f"gate: the pieces of a micro-batch end at column {end} of {len(batch.token_ids)}")


def _check_path(batch: MicroBatch, placement: Placement, columns: Tensor) -> None:
    """What attention lets a sample see is that sample, token for token, counted from 0."""
    sample = placement.sample
    if piece_path(batch.pieces, placement.path[-1]) != placement.path:
        raise GateError(f"gate: trajectory {sample.trajectory_id}: its pieces {placement.path} are no path")
    expected = {
        "token_ids": torch.tensor(sample.token_ids),
        "position_ids": torch.arange(len(sample)),
        "previous": torch.cat([torch.tensor([-1]), columns[:-1]]),
    }
    for name, values in expected.items():
        found = getattr(batch, name)[columns]
        if len(found) != len(values) or (found != values).any():
            where = f", first at its token {int((found != values).nonzero()[0])}" if len(found) == len(values) else ""
            raise GateError(
                f"gate: trajectory {sample.trajectory_id}: {name} of the row are not the sample's{where}; it would see "
                "other tokens than its own"
            )


def _micro_batch(samples: Sequence[TrainingSample], weights: Sequence[float]) -> MicroBatch:
    tree = grow_tree(samples) if samples else _empty_tree()
    count = len(tree.token_ids)
    position_ids, previous = (torch.full((count,), -1, dtype=torch.long) for _ in range(2))
    for piece in tree.pieces:
        before = -1 if piece.parent is None else tree.pieces[piece.parent].stop - 1
        first = 0 if before < 0 else int(position_ids[before]) + 1
        position_ids[piece.start : piece.stop] = torch.arange(first, first + len(piece))
        previous[piece.start : piece.stop] = torch.arange(piece.start - 1, piece.stop - 1)
        previous[piece.start] = before
    loss_mask = torch.zeros(count, dtype=torch.bool)
    sampled_logprobs, advantages, loss_weights = (torch.zeros(count) for _ in range(3))
    for sample, weight, leaf in zip(samples, weights, tree.leaves, strict=True):
        # Nothing that is shared is trained: what is to be filled in lies in the sample's own piece.
        piece = tree.pieces[leaf]
        own, tail = slice(piece.start, piece.stop), slice(len(sample) - len(piece), None)
        loss_mask[own] = torch.tensor(sample.loss_mask[tail])
        sampled_logprobs[own] = torch.tensor(sample.sampled_logprobs[tail])
        advantages[own] = torch.tensor(sample.advantages[tail])
        loss_weights[own] = weight * loss_mask[own]
    return MicroBatch(
        token_ids=torch.tensor(tree.token_ids),
        position_ids=position_ids,
        previous=previous,
        loss_mask=loss_mask,
        sampled_logprobs=sampled_logprobs,
        advantages=advantages,
        loss_weights=loss_weights,
        pieces=tuple(tree.pieces),
        placements=tuple(
            Placement(sample=sample, path=piece_path(tree.pieces, leaf))
            for sample, leaf in zip(samples, tree.leaves, strict=True)
        ),
    )


def _empty_tree() -> PrefixTree:
    """One token, whichever: a model cannot be called with none."""
    tree = PrefixTree()
    tree.add((0,), None)
    return tree
