"""One token from three logits, computed by hand: what penalties and cuts leave, in vLLM's order."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.types import SamplingParams
from rollouts.token_sampling import keep_min_p, keep_top_k, keep_top_p, penalise, sample_token

PROBS = [0.5, 0.3, 0.2]


def params(**changed: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, "stop_token_ids": (), **changed})  # type: ignore[arg-type]


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs).log()


def support(logits: torch.Tensor) -> list[float]:
    """The probabilities that are left."""
    return logits.softmax(-1).tolist()


def draw(logits: torch.Tensor, sampling: SamplingParams, seeds: int = 300) -> dict[int, float]:
    """Every token that is ever drawn, with the logprob that it comes with."""
    return dict(sample_token(logits, sampling, torch.Generator().manual_seed(seed)) for seed in range(seeds))


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({}, {0: 0.5, 1: 0.3, 2: 0.2}),
        ({"temperature": 0.5}, {0: 25 / 38, 1: 9 / 38, 2: 4 / 38}),
        ({"top_k": 2}, {0: 5 / 8, 1: 3 / 8}),
        ({"top_k": 5}, {0: 0.5, 1: 0.3, 2: 0.2}),
        ({"top_p": 0.6}, {0: 5 / 8, 1: 3 / 8}),
        ({"top_p": 0.45}, {0: 1.0}),
        ({"min_p": 0.5}, {0: 5 / 8, 1: 3 / 8}),
        ({"min_p": 1.0}, {0: 1.0}),
        # At temperature 0.5 the third has 4/25 of the first's probability; at 1 it would have 2/5.
        ({"temperature": 0.5, "min_p": 0.2}, {0: 25 / 34, 1: 9 / 34}),
        # What top_k leaves is 5/8 and 3/8, and the first alone holds 0.6 of that.
        ({"top_k": 2, "top_p": 0.6}, {0: 1.0}),
        ({"min_p": 0.5, "top_p": 0.6}, {0: 1.0}),
    ],
)
def test_cuts_leave_what_is_computed_by_hand(changed: dict[str, float], left: dict[int, float]) -> None:
    drawn = draw(logits_of(PROBS), params(**changed))
    assert {token: math.exp(logprob) for token, logprob in drawn.items()} == pytest.approx(left, abs=1e-6)


def test_tokens_are_drawn_as_often_as_their_logprobs_say() -> None:
    sampling = params(top_k=2)
    counts = Counter(
        sample_token(logits_of(PROBS), sampling, torch.Generator().manual_seed(seed))[0] for seed in range(4000)
    )
    assert counts[0] / 4000 == pytest.approx(5 / 8, abs=0.04)  # five standard deviations


def test_temperature_0_is_the_likeliest_with_its_logprob_uncut() -> None:
    token, logprob = sample_token(logits_of(PROBS), params(temperature=0, top_k=1), torch.Generator())
    assert (token, math.exp(logprob)) == (0, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [2.0, -1.0, 3.0]),
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 3.0]),
        ({"presence_penalty": 0.5}, [2.0, -1.5, 3.0]),
        ({"frequency_penalty": 0.25}, [2.0, -1.5, 3.0]),
        ({"presence_penalty": -0.5, "frequency_penalty": -0.25}, [2.0, 0.0, 3.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}, [1.0, -3.0, 3.0]),
    ],
)
def test_penalties_by_hand_prompt_0_completion_1_1(changed: dict[str, float], expected: list[float]) -> None:
    assert penalise(torch.tensor([2.0, -1.0, 3.0]), params(**changed), [0], [1, 1]).tolist() == expected


def test_a_token_that_the_grammar_forbids_stays_forbidden_under_penalties() -> None:
    logits = torch.tensor([2.0, float("-inf"), 3.0])
    sampling = params(repetition_penalty=2.0, presence_penalty=-2.0, frequency_penalty=-2.0)
    assert penalise(logits, sampling, [1], [1, 1])[1] == float("-inf")


def test_ties_with_the_last_of_top_k_stay() -> None:
    assert support(keep_top_k(torch.tensor([1.0, 0.0, 0.0, -1.0]), 2))[1:] == pytest.approx([0.2119416, 0.2119416, 0.0])


LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8).map(torch.tensor)


@given(logits=LOGITS, top_k=st.integers(0, 9), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1))
def test_cuts_keep_the_likeliest_tokens_and_never_nothing(
    logits: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> None:
    left = keep_top_p(keep_top_k(keep_min_p(logits, min_p), top_k), top_p)
    kept = left.isfinite()
    assert kept.any()
    assert torch.equal(left[kept], logits[kept])
    if not kept.all():
        assert logits[kept].min() >= logits[~kept].max()
