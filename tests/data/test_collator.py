"""Packing: every sample is in one place, once, alone in attention, and no row is longer than the longest sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.collator import MicroBatch, check_layout, pack, unpack
from data.gate import GateError
from data.rows import SampleBuilder
from data.types import Completion, Excluded, Segment, Source, TrainingSample
from tests.data.test_types import no_clock

PAD = 7


def make_sample(index: int, prompt: int, sampled: int, excluded: Excluded | None = None) -> TrainingSample:
    """A prompt and a sampled turn with an observation after it; every token of every sample differs."""
    first = 100 * (index + 1)
    ids = tuple(range(first + prompt, first + prompt + sampled))
    completion = Completion(
        completion_id=f"t{index}/0",
        token_ids=ids,
        logprobs=tuple(-1 / token for token in ids),
        finish_reason="stop",
        policy="p",
        policy_version=(0,) * sampled,
    )
    builder = SampleBuilder(f"t{index}")
    builder.add_context(Segment(source=Source.PROMPT, token_ids=tuple(range(first, first + prompt))))
    builder.add_sampled(Segment.sampled(completion), advantage=index + 0.5, excluded=excluded)
    builder.add_context(Segment(source=Source.TOOL, token_ids=(first + 99,)))
    return builder.build()


shapes = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=9)


def packed(sizes: list[tuple[int, int]], max_tokens: int) -> tuple[list[TrainingSample], list[MicroBatch]]:
    samples = [make_sample(index, *size) for index, size in enumerate(sizes)]
    weights = [1 / (index + 1) for index in range(len(samples))]
    return samples, pack(samples, weights, max_tokens=max_tokens, pad_token_id=PAD)


@settings(no_clock, max_examples=60)
@given(sizes=shapes, max_tokens=st.integers(21, 120))
def test_every_sample_is_placed_once_within_the_limits(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    samples, batches = packed(sizes, max_tokens)
    capacity = max(len(sample) for sample in samples)
    placed = [placement.sample.trajectory_id for batch in batches for placement in batch.placements]
    assert Counter(placed) == Counter(sample.trajectory_id for sample in samples)
    for batch in batches:
        rows, columns = batch.token_ids.shape
        assert columns <= capacity
        assert rows * columns <= max_tokens
        assert all(
            getattr(batch, name).shape == (rows, columns)
            for name in ("position_ids", "loss_mask", "sampled_logprobs", "advantages", "loss_weights")
        )


@settings(no_clock, max_examples=60)
@given(sizes=shapes, max_tokens=st.integers(21, 120))
def test_tensors_hold_the_samples_and_nothing_else(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    samples, batches = packed(sizes, max_tokens)
    index_of = {sample.trajectory_id: index for index, sample in enumerate(samples)}
    for batch in batches:
        free = torch.ones_like(batch.loss_mask)
        for placement in batch.placements:
            sample, row = placement.sample, placement.row
            span = slice(placement.start, placement.start + len(sample))
            assert free[row, span].all(), "two samples overlap"
            free[row, span] = False
            mask = torch.tensor(sample.loss_mask)
            assert batch.token_ids[row, span].tolist() == list(sample.token_ids)
            assert batch.position_ids[row, span].tolist() == list(range(len(sample)))
            assert torch.equal(batch.loss_mask[row, span], mask)
            assert torch.equal(batch.advantages[row, span], torch.tensor(sample.advantages))
            assert torch.equal(batch.sampled_logprobs[row, span], torch.tensor(sample.sampled_logprobs))
            weight = 1 / (index_of[sample.trajectory_id] + 1)
            assert torch.equal(batch.loss_weights[row, span], weight * mask)
        assert (batch.token_ids[free] == PAD).all()
        assert not batch.loss_mask[free].any()
        for values in (batch.sampled_logprobs, batch.advantages, batch.loss_weights):
            assert (values[free] == 0).all()
        # The padding of a row is one run at its end, with positions of its own.
        for positions, empty in zip(batch.position_ids, free, strict=True):
            assert positions[empty].tolist() == list(range(int(empty.sum())))
            assert not empty[: len(empty) - int(empty.sum())].any()


@settings(no_clock, max_examples=30)
@given(sizes=shapes, max_tokens=st.integers(21, 120))
def test_the_same_samples_give_the_same_batches(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    (_, first), (_, second) = packed(sizes, max_tokens), packed(sizes, max_tokens)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.placements == other.placements
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.loss_weights, other.loss_weights)


@settings(no_clock, max_examples=30)
@given(sizes=shapes, max_tokens=st.integers(21, 120))
def test_packing_never_costs_more_rows_than_samples(sizes: list[tuple[int, int]], max_tokens: int) -> None:
    samples, batches = packed(sizes, max_tokens)
    rows = sum(batch.token_ids.shape[0] for batch in batches)
    capacity = max(len(sample) for sample in samples)
    assert rows <= len(samples)
    # First-fit: no two rows could be one.
    assert rows <= 2 * sum(len(sample) for sample in samples) / capacity + 1


def test_unpack_reads_what_the_tensors_hold_a09() -> None:
    """Ids, mask, logprobs and advantages come back with one length, whatever happened to the tensors."""
    samples, batches = packed([(2, 3), (4, 6), (1, 1)], 60)
    for batch in batches:
        batch.token_ids.add_(1)
    unpacked = {sample.trajectory_id: sample for batch in batches for sample in unpack(batch)}
    for sample in samples:
        read = unpacked[sample.trajectory_id]
        assert read.token_ids == tuple(token + 1 for token in sample.token_ids)
        assert (read.loss_mask, read.source, read.excluded) == (sample.loss_mask, sample.source, sample.excluded)
        assert len(read.sampled_logprobs) == len(read.advantages) == len(read.token_ids)


@pytest.mark.parametrize("excluded", list(Excluded))
def test_excluded_tokens_have_no_weight(excluded: Excluded) -> None:
    samples = [make_sample(0, 2, 3, excluded), make_sample(1, 2, 3)]
    (batch,) = pack(samples, [1.0, 1.0], max_tokens=100, pad_token_id=PAD)
    assert int(batch.loss_mask.sum()) == 3
    assert torch.equal(batch.loss_weights > 0, batch.loss_mask)
    assert torch.equal(batch.advantages != 0, batch.loss_mask)


def test_a_sample_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"a sample has 13 tokens; raise max_micro_batch_tokens \(now 12\)"):
        packed([(4, 8), (1, 1)], 12)


def test_no_samples_are_no_batches() -> None:
    assert pack([], [], max_tokens=10, pad_token_id=PAD) == []


def test_to_a_device_keeps_everything() -> None:
    _, (batch,) = packed([(2, 3)], 60)
    moved = batch.to(torch.device("cpu"))
    assert moved.placements == batch.placements
    assert torch.equal(moved.loss_weights, batch.loss_weights)


def padded() -> MicroBatch:
    _, (batch,) = packed([(8, 12), (1, 2)], 60)
    assert (batch.token_ids == PAD).any()
    return batch


def spoil(batch: MicroBatch, name: str, row: int, column: int, value: float) -> MicroBatch:
    tensor = getattr(batch, name).clone()
    tensor[row, column] = value
    return replace(batch, **{name: tensor})


@pytest.mark.parametrize(
    ("name", "column", "value", "says"),
    [
        ("loss_mask", -1, True, "a token of the padding is trained"),
        ("loss_weights", -1, 0.5, "loss_weights must be positive where a token is trained, and 0 elsewhere"),
        ("loss_weights", 1, float("nan"), "loss_weights"),
        ("loss_weights", 1, 0.0, "loss_weights"),
        ("position_ids", 0, 3, "samples of a row would see each other"),
        ("position_ids", -1, 9, "samples of a row would see each other"),
    ],
)
def test_what_only_the_tensors_show_is_checked(name: str, column: int, value: float, says: str) -> None:
    batch = padded()
    check_layout(batch)
    with pytest.raises(GateError, match=says):
        check_layout(spoil(batch, name, 1, column, value))
