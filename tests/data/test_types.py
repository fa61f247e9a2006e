"""The words of token-exact training: their lengths are checked when they are built, and a stream only grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.types import Completion, SamplingParams, Segment, Source, TokenStream, TrainingSample

# A busy machine is slow; no test of ours asserts a time.
no_clock = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

SAMPLE = TrainingSample(
    trajectory_id="t",
    token_ids=(7, 4, 2, 9),
    source=(Source.PROMPT, Source.MODEL, Source.MODEL, Source.TEMPLATE),
    loss_mask=(False, True, True, False),
    sampled_logprobs=(0.0, -0.5, -0.25, 0.0),
    advantages=(0.0, 1.0, 1.0, 0.0),
    turn=(-1, 0, 0, 0),
    completion_ids=("t/0",),
    completion_index=(-1, 0, 0, -1),
    completion_position=(-1, 0, 1, -1),
    policy_version=(-1, 0, 0, -1),
    excluded=(None, None, None, None),
)
PER_TOKEN = [f.name for f in fields(TrainingSample) if f.name not in ("trajectory_id", "completion_ids")]


def make_completion(token_ids: Sequence[int], **changes: Any) -> Completion:
    n = len(token_ids)
    values = {
        "completion_id": "c",
        "token_ids": tuple(token_ids),
        "logprobs": (-1.0,) * n,
        "finish_reason": "stop",
        "policy": "p",
        "policy_version": (0,) * n,
    }
    return Completion(**(values | changes))


@no_clock
@given(n=st.integers(0, 5), logprobs=st.integers(0, 5), versions=st.integers(0, 5))
def test_a_completion_has_one_length(n: int, logprobs: int, versions: int) -> None:
    changes = {"logprobs": (-1.0,) * logprobs, "policy_version": (0,) * versions}
    if n == logprobs == versions:
        assert len(make_completion(range(n), **changes).token_ids) == n
    else:
        with pytest.raises(ValueError, match=f"c: {n} token ids, {logprobs} logprobs and {versions} versions"):
            make_completion(range(n), **changes)


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("longer", [False, True])
def test_every_per_token_field_of_a_sample_has_one_length(name: str, longer: bool) -> None:
    values = getattr(SAMPLE, name)
    changed = (*values, values[-1]) if longer else values[:-1]
    with pytest.raises(ValueError, match=f"t: per-token fields differ in length: .*'{name}': {len(changed)}"):
        replace(SAMPLE, **{name: changed})


def test_only_model_segments_carry_a_completion() -> None:
    completion = make_completion([4, 2])
    segment = Segment.sampled(completion)
    assert segment.source is Source.MODEL
    assert (segment.token_ids, segment.logprobs) == (completion.token_ids, completion.logprobs)
    for source in Source:
        for field, value in (("completion_id", "c"), ("logprobs", (-1.0,)), ("policy_version", (0,))):
            with pytest.raises(ValueError, match="MODEL segment"):
                Segment(source=source, token_ids=(4,), **{field: value})


def test_a_model_segment_needs_its_completion_a27() -> None:
    with pytest.raises(ValueError, match="a MODEL segment of 2 tokens needs a completion_id, logprobs and versions"):
        Segment(source=Source.MODEL, token_ids=(4, 2))


@pytest.mark.parametrize(
    "change", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_tokens": 0}], ids=lambda c: next(iter(c))
)
def test_sampling_parameters_are_checked(change: dict[str, float]) -> None:
    good = SamplingParams(max_tokens=1, stop_token_ids=(3,))
    with pytest.raises(ValueError, match="out of range"):
        replace(good, **change)


def test_what_was_recorded_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        SAMPLE.loss_mask = (True,) * 4  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        make_completion([1]).token_ids = (2,)  # type: ignore[misc]


segments = st.one_of(
    st.sampled_from([Source.PROMPT, Source.TOOL]).map(lambda source: Segment(source=source, token_ids=(1, 2))),
    st.lists(st.integers(0, 9), max_size=3).map(lambda ids: Segment.sampled(make_completion(ids))),
    st.just(Segment(source=Source.TOOL, token_ids=())),
)


@no_clock
@given(parts=st.lists(segments, max_size=8))
def test_a_stream_only_grows(parts: list[Segment]) -> None:
    stream = TokenStream()
    for part in parts:
        before = stream.token_ids
        stream.append(part)
        assert stream.token_ids == [*before, *part.token_ids]
        assert len(stream) == len(stream.token_ids)
    assert list(stream) == [part for part in parts if part.token_ids]
