"""Micro-batches: every sample is in one row, once, sharing its beginning where that pays, and what the tensors hold is
what the samples say; the gate finds whatever is not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.collator import MicroBatch, Placement, check_layout, columns_of, pack, trajectory_index, unpack
from data.gate import GateError
from data.prefix_tree import Piece
from data.rows import SampleBuilder
from data.types import Completion, Excluded, Segment, Source, TrainingSample
from tests.data.test_types import no_clock


def make_sample(
    index: int,
    prompt: tuple[int, ...],
    sampled: int,
    excluded: Excluded | None = None,
    *,
    trajectory: str | None = None,
) -> TrainingSample:
    """A prompt and a sampled turn with an observation after it; sampled tokens of every sample differ."""
    first = 1000 * (index + 1)
    ids = tuple(range(first, first + sampled))
    completion = Completion(
        completion_id=f"t{index}/0",
        token_ids=ids,
        logprobs=tuple(-1 / token for token in ids),
        finish_reason="stop",
        policy="p",
        policy_version=(0,) * sampled,
    )
    builder = SampleBuilder(trajectory or f"t{index}")
    builder.add_context(Segment(source=Source.PROMPT, token_ids=prompt))
    builder.add_sampled(Segment.sampled(completion), advantage=index + 0.5, excluded=excluded)
    builder.add_context(Segment(source=Source.TOOL, token_ids=(first + 999,)))
    return builder.build()


SYSTEM, TASK = tuple(range(20, 60)), tuple(range(60, 90))


@st.composite
def batches_of_samples(draw: st.DrawFn) -> list[TrainingSample]:
    """Prompts that begin alike or not: a common system text, common tasks, and a tail of their own."""
    samples = []
    for index in range(draw(st.integers(1, 8))):
        beginning = draw(st.sampled_from([(), SYSTEM, SYSTEM + TASK, SYSTEM[:18]]))
        own = tuple(draw(st.lists(st.integers(8, 10), min_size=1, max_size=4)))
        excluded = draw(st.sampled_from([None, None, None, Excluded.STALE]))
        samples.append(make_sample(index, beginning + own, draw(st.integers(1, 12)), excluded))
    return samples


def packed(samples: list[TrainingSample], max_tokens: int, **options: Any) -> list[MicroBatch]:
    weights = [1 / (index + 1) for index in range(len(samples))]
    return pack(samples, weights, max_tokens=max_tokens, **options)


@settings(no_clock, max_examples=80)
@given(samples=batches_of_samples(), max_tokens=st.integers(90, 300))
def test_the_tensors_hold_the_samples_and_nothing_else(samples: list[TrainingSample], max_tokens: int) -> None:
    batches = packed(samples, max_tokens)
    index_of = {sample.trajectory_id: index for index, sample in enumerate(samples)}
    seen = Counter(placement.sample.trajectory_id for batch in batches for placement in batch.placements)
    assert seen == Counter(index_of.keys())
    for batch in batches:
        check_layout(batch)
        assert len(batch.token_ids) <= max_tokens
        covered = torch.zeros(len(batch.token_ids), dtype=torch.long)
        weights = torch.zeros(len(batch.token_ids))
        for placement in batch.placements:
            sample, columns = placement.sample, columns_of(batch, placement)
            mask = torch.tensor(sample.loss_mask)
            covered[columns] += 1
            assert batch.token_ids[columns].tolist() == list(sample.token_ids)
            assert batch.position_ids[columns].tolist() == list(range(len(sample)))
            assert batch.previous[columns].tolist() == [-1, *columns[:-1].tolist()]
            assert torch.equal(batch.loss_mask[columns], mask)
            assert torch.equal(batch.advantages[columns], torch.tensor(sample.advantages))
            assert torch.equal(batch.sampled_logprobs[columns], torch.tensor(sample.sampled_logprobs))
            weights[columns] += mask / (index_of[sample.trajectory_id] + 1)
        assert (covered > 0).all(), "no padding"
        assert not batch.loss_mask[covered > 1].any(), "nothing shared is trained"
        assert torch.equal(batch.loss_weights, weights)
        assert unpack(batch) == [
            replace(s, sampled_logprobs=_rounded(s.sampled_logprobs), advantages=_rounded(s.advantages))
            for s in (placement.sample for placement in batch.placements)
        ]


def _rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    """As float32 holds them."""
    return tuple(torch.tensor(values).tolist())


def test_siblings_share_their_prompt_by_hand() -> None:
    """The prompt is there once, in front; both first answers are predicted by its last token."""
    prompt = SYSTEM[:20]
    (batch,) = packed([make_sample(0, prompt, 2), make_sample(1, prompt, 1)], 100)
    assert [(piece.start, piece.stop, piece.parent) for piece in batch.pieces] == [
        (0, 20, None),
        (20, 23, 0),
        (23, 25, 0),
    ]
    assert batch.token_ids.tolist() == [*prompt, 1000, 1001, 1999, 2000, 2999]
    assert batch.position_ids.tolist() == [*range(20), 20, 21, 22, 20, 21]
    assert batch.previous.tolist() == [-1, *range(19), 19, 20, 21, 19, 23]
    assert batch.loss_mask.nonzero().flatten().tolist() == [20, 21, 23]
    assert trajectory_index(batch).tolist() == [0, 0, 1]


def test_what_was_sampled_is_never_shared() -> None:
    """Two siblings that begin with the same sampled tokens, left out of training: each keeps its own logprobs."""
    one = make_sample(0, SYSTEM, 30, Excluded.STALE)
    other = replace(one, trajectory_id="other", sampled_logprobs=tuple(2 * value for value in one.sampled_logprobs))
    (batch,) = packed([one, other], 300)
    assert batch.pieces[0].stop == len(SYSTEM)
    assert [_rounded(sample.sampled_logprobs) for sample in unpack(batch)] == [
        _rounded(sample.sampled_logprobs) for sample in (one, other)
    ]


def test_streams_of_a_trajectory_have_one_index_and_share() -> None:
    streams = [make_sample(i, (*SYSTEM, i), 3, trajectory="a" if i < 2 else "b") for i in (0, 1, 2)]
    (batch,) = packed(streams, 300)
    assert trajectory_index(batch).tolist() == [0] * 6 + [1] * 3
    assert len(batch.token_ids) == len(SYSTEM) + 3 * 5


@pytest.mark.parametrize("excluded", list(Excluded))
def test_excluded_tokens_have_no_weight(excluded: Excluded) -> None:
    (batch,) = packed([make_sample(0, (8, 9), 3, excluded), make_sample(1, (8, 9), 3)], 100)
    assert int(batch.loss_mask.sum()) == 3
    assert torch.equal(batch.loss_weights > 0, batch.loss_mask)
    assert torch.equal(batch.advantages != 0, batch.loss_mask)


def test_unpack_reads_what_the_tensors_hold_a09() -> None:
    """Ids, mask, logprobs and advantages come back with one length, whatever happened to the tensors."""
    samples = [make_sample(0, SYSTEM, 3), make_sample(1, SYSTEM, 6), make_sample(2, (8,), 1)]
    batches = packed(samples, 200)
    for batch in batches:
        batch.token_ids.add_(1)
    unpacked = {sample.trajectory_id: sample for batch in batches for sample in unpack(batch)}
    for sample in samples:
        read = unpacked[sample.trajectory_id]
        assert read.token_ids == tuple(token + 1 for token in sample.token_ids)
        assert (read.loss_mask, read.source, read.excluded) == (sample.loss_mask, sample.source, sample.excluded)
        assert len(read.sampled_logprobs) == len(read.advantages) == len(read.token_ids)


def test_a_process_without_samples_gets_a_token_that_is_not_trained() -> None:
    first, second = packed([make_sample(0, SYSTEM, 3)], 100, processes=2)
    assert (len(first.placements), len(second.placements)) == (1, 0)
    check_layout(second)
    assert unpack(second) == []
    assert len(second.token_ids) == 1
    assert not second.loss_mask.any()
    assert trajectory_index(second).tolist() == []


def test_to_a_device_keeps_everything() -> None:
    (batch,) = packed([make_sample(0, SYSTEM, 3)], 60)
    moved = batch.to(torch.device("cpu"))
    assert (moved.placements, moved.pieces) == (batch.placements, batch.pieces)
    assert torch.equal(moved.loss_weights, batch.loss_weights)


# What the gate finds. Columns: 40 of the shared prompt, then 4 of the first sample (3 sampled) and 3 of the second.
FIRST, SECOND = 40, 44


def shared() -> MicroBatch:
    (batch,) = packed([make_sample(0, SYSTEM, 3), make_sample(1, SYSTEM, 2)], 100)
    assert [len(piece) for piece in batch.pieces] == [40, 4, 3]
    return batch


def spoil(batch: MicroBatch, name: str, column: int, value: float) -> MicroBatch:
    tensor: Tensor = getattr(batch, name).clone()
    tensor[column] = value
    return replace(batch, **{name: tensor})


@pytest.mark.parametrize(
    ("name", "column", "value", "says"),
    [
        ("loss_mask", 39, True, "the token in column 39 is trained, which 2 samples share"),
        ("loss_mask", 0, True, "the token in column 0 is trained, which 2 samples share"),
        ("loss_weights", 39, 0.5, "loss_weights must be positive where a token is trained, and 0 elsewhere"),
        ("loss_weights", FIRST, float("nan"), "loss_weights"),
        ("loss_weights", FIRST, 0.0, "loss_weights"),
        ("token_ids", 3, 7, "trajectory t0: token_ids of the row are not the sample's, first at its token 3"),
        ("token_ids", SECOND, 7, "trajectory t1: token_ids of the row are not the sample's, first at its token 40"),
        ("position_ids", 0, 3, "trajectory t0: position_ids of the row are not the sample's"),
        ("position_ids", SECOND, 44, "trajectory t1: position_ids of the row are not the sample's"),
        ("previous", SECOND, SECOND - 1, "trajectory t1: previous of the row are not the sample's"),
        ("previous", FIRST, -1, "trajectory t0: previous of the row are not the sample's"),
    ],
)
def test_what_only_the_tensors_show_is_checked(name: str, column: int, value: float, says: str) -> None:
    batch = shared()
    check_layout(batch)
    with pytest.raises(GateError, match=says):
        check_layout(spoil(batch, name, column, value))


def with_pieces(batch: MicroBatch, *pieces: tuple[int, int, int | None]) -> MicroBatch:
    made = tuple(Piece(start=start, stop=stop, parent=parent) for start, stop, parent in pieces)
    return replace(batch, pieces=made)


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([(0, 40, None), (40, 44, 0), (44, 47, 1)], r"trajectory t1: its pieces \(0, 2\) are no path"),
        ([(0, 40, None), (40, 44, 0), (44, 47, None)], r"trajectory t1: its pieces \(0, 2\) are no path"),
        ([(0, 40, None), (40, 45, 0), (45, 47, 0)], "trajectory t0: token_ids of the row are not the sample's;"),
        ([(0, 40, None), (40, 43, 0), (44, 47, 0)], "piece 2 of a micro-batch does not continue the row"),
        ([(0, 40, None), (40, 44, 0), (43, 47, 0)], "piece 2 of a micro-batch does not continue the row"),
        ([(0, 40, 1), (40, 44, 0), (44, 47, 0)], "piece 0 of a micro-batch does not continue the row"),
        ([(0, 40, None), (40, 44, 0), (44, 46, 0)], "the pieces of a micro-batch end at column 46 of 47"),
        ([(0, 40, None), (40, 44, 0), (44, 44, 0), (44, 47, 0)], "piece 2 of a micro-batch does not continue the row"),
    ],
)
def test_a_sample_that_would_see_another_is_found(pieces: list[tuple[int, int, int | None]], says: str) -> None:
    with pytest.raises(GateError, match=says):
        check_layout(with_pieces(shared(), *pieces))


def test_a_sample_in_the_place_of_another_is_found() -> None:
    batch = shared()
    first, second = batch.placements
    swapped = (replace(first, path=second.path), replace(second, path=first.path))
    with pytest.raises(GateError, match="trajectory t0: token_ids of the row are not the sample's"):
        check_layout(replace(batch, placements=swapped))


def test_tokens_of_no_sample_are_found_trained_or_not() -> None:
    batch = shared()
    with pytest.raises(GateError, match="column 44 of a micro-batch belongs to no sample"):
        check_layout(replace(batch, placements=batch.placements[:1]))
    (empty,) = [b for b in packed([make_sample(0, SYSTEM, 3)], 100, processes=2) if not b.placements]
    with pytest.raises(GateError, match="the token in column 0 is trained, which belongs to no sample"):
        check_layout(spoil(empty, "loss_mask", 0, True))


def test_a_first_token_that_is_trained_is_found() -> None:
    (batch,) = packed([make_sample(0, (8,), 3)], 100)
    with pytest.raises(GateError, match="the first token of a sample is trained, and nothing predicts it"):
        check_layout(spoil(spoil(batch, "loss_mask", 0, True), "loss_weights", 0, 1.0))


def test_a_placement_says_where_a_sample_is() -> None:
    batch = shared()
    assert [placement.path for placement in batch.placements] == [(0, 1), (0, 2)]
    assert isinstance(batch.placements[0], Placement)
    assert columns_of(batch, batch.placements[1]).tolist() == [*range(40), 44, 45, 46]
