"""The loss of trained tokens: numbers by hand, the papers' formulas, invariance to splits and order, and finiteness."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from tests.data.test_types import no_clock
from tests.train.loss_cases import CORRECTIONS, VARIANTS, Case, cases, make_tokens, take, textbook_loss
from train.config import GrpoConfig
from train.correction import kl_estimate
from train.loss import TrainedTokens, policy_loss
from train.loss_metrics import SUMS, LossTerms, loss_metrics

OPTIONS = [a | b for a in VARIANTS for b in CORRECTIONS]
COLUMNS = ("old_logprobs", "sampled_logprobs", "advantages", "trajectory", "entropies", "ref_logprobs")

pytestmark = pytest.mark.usefixtures("one_thread")


def loss_and_gradient(tokens: TrainedTokens, config: GrpoConfig) -> tuple[LossTerms, list[float]]:
    terms = policy_loss(tokens, config)
    (gradient,) = torch.autograd.grad(terms.loss, tokens.logprobs)
    return terms, gradient.tolist()


def metrics_of(terms: LossTerms, config: GrpoConfig) -> dict[str, Any]:
    return numbers(terms.sums, terms.maxima, config)


def numbers(sums: Tensor, maxima: Tensor, config: GrpoConfig) -> dict[str, Any]:
    """The metrics that are numbers; which tokens the maxima are at, only a learner's batches tell."""
    metrics = loss_metrics(sums.tolist(), [(value, "") for value in maxima.tolist()], config)
    return {name: value for name, value in metrics.items() if not name.endswith("_token")}


# By hand.


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, None),
        (1.5, 1.0, -1.28, "high"),  # already more likely than the clip allows
        (0.5, 1.0, -0.5, None),
        (1.5, -1.0, 1.5, None),
        (0.5, -1.0, 0.8, "low"),  # already less likely than the clip allows
        (1.25, 1.0, -1.25, None),  # between 1 + epsilon and 1 + epsilon_high
        (3.0, 0.0, 0.0, None),
    ],
)
def test_the_clip_by_hand(ratio: float, advantage: float, loss: float, clipped: str | None) -> None:
    config = GrpoConfig(epsilon=0.2, epsilon_high=0.28)
    tokens = make_tokens([-1.0 + math.log(ratio)], old_logprobs=[-1.0], advantages=[advantage], weights=[3.0])
    terms, gradient = loss_and_gradient(tokens, config)
    assert terms.loss.item() == pytest.approx(3.0 * loss, rel=1e-6, abs=1e-6)
    assert gradient == pytest.approx([0.0 if clipped else -3.0 * ratio * advantage], rel=1e-6, abs=1e-6)
    metrics = metrics_of(terms, config)
    assert (metrics["clip_ratio/low"], metrics["clip_ratio/high"]) == (clipped == "low", clipped == "high")
    assert metrics["clip_ratio"] == (clipped is not None)
    assert metrics["ratio/mean"] == pytest.approx(ratio, rel=1e-6)


def test_gspo_by_hand() -> None:
    """Ratios 1 and 4 in one trajectory have the geometric mean 2; the other trajectory is on policy."""
    config = GrpoConfig(loss_type="grpo", importance_sampling_level="sequence", epsilon_high=2.0)
    tokens = make_tokens(
        [-1.0, -1.0 + math.log(4.0), -1.0],
        old_logprobs=[-1.0, -1.0, -1.0],
        advantages=[1.0, 1.0, -1.0],
        weights=[1 / 4, 1 / 4, 1 / 2],
        trajectory=[0, 0, 1],
    )
    terms, gradient = loss_and_gradient(tokens, config)
    assert terms.loss.item() == pytest.approx(-(2.0 + 2.0) / 4 + 1 / 2)
    assert gradient == pytest.approx([-2.0 / 4, -2.0 / 4, 1 / 2])
    assert metrics_of(terms, config)["ratio/mean"] == pytest.approx((2 + 2 + 1) / 3)


def test_rloo_by_hand() -> None:
    """The product of 1.25 and 2 is 2.5, once for the trajectory, and the whole gradient at each of its tokens."""
    config = GrpoConfig(loss_type="rloo", epsilon_high=2.0)
    tokens = make_tokens(
        [-1.0 + math.log(1.25), -1.0 + math.log(2.0)],
        old_logprobs=[-1.0, -1.0],
        advantages=[3.0, 3.0],
        weights=[1 / 2, 1 / 2],
    )
    terms, gradient = loss_and_gradient(tokens, config)
    assert terms.loss.item() == pytest.approx(-2.5 * 3)
    assert gradient == pytest.approx([-2.5 * 3, -2.5 * 3])


@pytest.mark.parametrize("loss_type", ["grpo", "rloo"])
def test_a_trajectory_ratio_leaves_each_token_its_own_advantage_and_correction(loss_type: Any) -> None:
    """Turn-level rewards: the trajectory's ratio, 2 or 4, weighs every token, whose gradient keeps its own factors."""
    level = "sequence" if loss_type == "grpo" else "token"
    config = GrpoConfig(loss_type=loss_type, importance_sampling_level=level, epsilon_high=9.0)
    tokens = make_tokens(
        [-1.0 + math.log(2.0)] * 2,
        old_logprobs=[-1.0, -1.0],
        sampled_logprobs=[-1.0, -1.0 - math.log(1.5)],
        advantages=[3.0, 1.0],
        weights=[1 / 2, 1 / 2],
    )
    terms, gradient = loss_and_gradient(tokens, config)
    ratio, slope = (2.0, 1.0) if loss_type == "grpo" else (4.0, 2.0)
    assert terms.loss.item() == pytest.approx(-ratio * (3.0 + 1.5) / 2)
    assert gradient == pytest.approx([-ratio * slope * 3.0 / 2, -ratio * slope * 1.5 / 2])


def test_cispo_by_hand() -> None:
    """A ratio of 4 counts as the bound, 2, and the token keeps its gradient."""
    config = GrpoConfig(loss_type="cispo", epsilon_high=2.0)
    tokens = make_tokens([-1.0 + math.log(4.0), -2.0], old_logprobs=[-1.0, -2.0], advantages=[3.0, -1.0])
    terms, gradient = loss_and_gradient(tokens, config)
    assert terms.loss.item() == pytest.approx(-(2 * 3 * (-1 + math.log(4.0)) + 1 * -1 * -2))
    assert gradient == pytest.approx([-6.0, 1.0])
    assert metrics_of(terms, config)["clip_ratio/high"] == 1 / 2


def test_the_penalty_by_hand() -> None:
    """At ref - current = log 2, k3 is 2 - log 2 - 1; its gradient is current - ref, times the ratio, 1."""
    config = GrpoConfig(beta=0.1)
    tokens = make_tokens([-2.0], advantages=[0.0], ref_logprobs=[-2.0 + math.log(2.0)])
    terms, gradient = loss_and_gradient(tokens, config)
    k3 = 1 - math.log(2.0)
    assert terms.loss.item() == pytest.approx(0.1 * k3, rel=1e-5)
    assert gradient == pytest.approx([-0.1 * math.log(2.0)], rel=1e-5)
    metrics = metrics_of(terms, config)
    assert metrics["kl/mean"] == metrics["kl/max"] == pytest.approx(k3, rel=1e-5)


def test_a_small_divergence_is_not_lost_in_rounding() -> None:
    """d² / 2 for a small d, and never below 0: engines differ by 1e-5 where all is well."""
    config = GrpoConfig()
    gaps = torch.linspace(-1e-5, 1e-5, 101)
    metrics = metrics_of(policy_loss(make_tokens(torch.zeros(101), sampled_logprobs=-gaps), config), config)
    assert metrics["logprob_gap/kl"] == pytest.approx((gaps.double() ** 2 / 2).mean().item(), rel=0.05)
    assert all((kl_estimate(gap) >= 0).all() for gap in (gaps, 1e3 * gaps))


def test_the_metrics_by_hand() -> None:
    config = GrpoConfig(vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_max=1.5)
    gaps = [math.log(2.0), 0.0, -math.log(4.0)]
    tokens = make_tokens(
        [-1.0, -1.0, -1.0],
        sampled_logprobs=[-1.0 - gap for gap in gaps],
        trajectory=[0, 0, 1],
        entropies=[0.5, 1.0, 1.5],
    )
    terms = policy_loss(tokens, config)
    metrics = metrics_of(terms, config)
    assert metrics["entropy"] == 1.0, "positive, and in nats"
    assert metrics["logprob_gap/mean"] == pytest.approx(math.log(8.0) / 3)
    assert metrics["logprob_gap/max"] == pytest.approx(math.log(4.0))
    assert metrics["logprob_gap/kl"] == pytest.approx((2 - math.log(2) - 1 + 1 / 4 + math.log(4) - 1) / 3)
    # The first trajectory's ratio is 2: masked. The other's is 1/4: all the effective weight is one token's.
    assert metrics["correction/tokens"] == pytest.approx(2 / 3)
    assert metrics["correction/trajectories"] == pytest.approx(1 / 2)
    assert metrics["correction/effective"] == pytest.approx(1 / 3)
    assert terms.loss.item() == pytest.approx(-1 / 4)
    assert "kl/mean" not in metrics
    assert terms.where.tolist()[1] == 2, "the token of the largest gap"


# The papers.


@no_clock
@given(case=cases())
def test_loss_and_gradient_are_those_of_the_papers(case: Case) -> None:
    expected = textbook_loss(case)
    (expected_gradient,) = torch.autograd.grad(expected, case.leaf)
    terms, gradient = loss_and_gradient(case.tokens, case.config)
    assert terms.loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(expected_gradient.tolist(), rel=1e-9, abs=1e-12)


# Splits, order, masks.


@no_clock
@given(case=cases(), data=st.data())
def test_neither_split_nor_order_changes_loss_gradient_or_metrics(case: Case, data: st.DataObject) -> None:
    """Tokens in any order, in micro-batches of whole trajectories, or of any tokens where nothing is sequence-level."""
    tokens, config = case.tokens, case.config
    n, trajectories = len(tokens.logprobs), int(tokens.trajectory.max()) + 1
    parts = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    part = torch.tensor(parts)
    if config.sequence_level:
        part = part[:trajectories][tokens.trajectory]
    order = torch.tensor(data.draw(st.permutations(range(n))))
    whole, gradient = loss_and_gradient(tokens, config)
    split = [policy_loss(take(tokens, order[part[order] == number]), config) for number in range(3)]
    total = torch.stack([terms.loss for terms in split]).sum()
    assert total.item() == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    assert torch.autograd.grad(total, case.leaf)[0].tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    sums, maxima = sum(terms.sums for terms in split), torch.stack([terms.maxima for terms in split]).amax(0)
    assert isinstance(sums, Tensor)
    assert numbers(sums, maxima, config) == pytest.approx(metrics_of(whole, config), rel=1e-9)


@no_clock
@given(case=cases())
def test_a_token_without_weight_has_no_gradient(case: Case) -> None:
    weights = case.tokens.weights.clone()
    weights[::2] = 0.0
    tokens = make_tokens(case.leaf, **{name: getattr(case.tokens, name) for name in COLUMNS} | {"weights": weights})
    _, gradient = loss_and_gradient(tokens, case.config)
    assert all(value == 0.0 for value in gradient[::2])


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_a_masked_token_has_no_gradient_and_keeps_its_place(mode: Any) -> None:
    """Off-policy tokens count in the denominators: the others weigh what they would without a mask."""
    config = GrpoConfig(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=2.0)
    tokens = make_tokens([-1.0, -1.0, -1.0], sampled_logprobs=[-3.0, -1.0, -1.0], trajectory=[0, 0, 1])
    terms, gradient = loss_and_gradient(tokens, config)
    assert gradient == ([0.0, -1.0, -1.0] if mode == "token_mask" else [0.0, 0.0, -1.0])
    assert metrics_of(terms, config)["correction/tokens"] == pytest.approx(1 / 3 if mode == "token_mask" else 2 / 3)


# Finiteness.


@pytest.mark.parametrize("where", ["old_logprobs", "sampled_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e5])
def test_a_ratio_out_of_all_bounds_is_finite_and_shown_c20(where: str, difference: float) -> None:
    """exp(100) is infinite in float32, and infinite times zero is NaN. Metrics show how far it was, and where."""
    ones = torch.ones(3)
    peak, place = ("kl/max", 2) if where == "ref_logprobs" else ("logprob_gap/max", 1)
    for options, advantage in product(OPTIONS, (1.0, -1.0)):
        config = GrpoConfig(**options, beta=0.1)
        columns: dict[str, Any] = dict.fromkeys(("old_logprobs", "sampled_logprobs", "ref_logprobs"), -ones)
        columns[where] = -ones + torch.tensor([0.0, difference, 0.0])
        tokens = make_tokens([-1.0] * 3, **columns, advantages=advantage * ones, trajectory=[0, 1, 1])
        terms, gradient = loss_and_gradient(tokens, config)
        assert torch.isfinite(terms.loss), options
        assert torch.isfinite(terms.sums).all(), options
        assert all(math.isfinite(value) for value in gradient), options
        assert gradient[0] == -advantage, "the other trajectory trains as ever"
        shown = abs(difference)
        if where == "ref_logprobs":
            shown = math.exp(20) - 21 if difference > 0 else 19 + math.exp(-20)
        assert metrics_of(terms, config)[peak] == pytest.approx(shown, rel=1e-5)
        assert terms.where[place] == 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_a_ratio_out_of_all_bounds_has_no_gradient_c20(advantage: float, log_ratio: float) -> None:
    """Nor does the penalty, which is weighed by the ratio, give it one."""
    columns: dict[str, Any] = {"old_logprobs": [-1.0, -1.0], "advantages": [advantage] * 2}
    tokens = make_tokens([-1.0 + log_ratio, -1.0], **columns)
    assert loss_and_gradient(tokens, GrpoConfig())[1] == [0.0, -advantage]
    tokens = make_tokens([-1.0 + log_ratio, -1.0], **columns, ref_logprobs=[-2.0, -1.0])
    assert loss_and_gradient(tokens, GrpoConfig(beta=0.1))[1] == [0.0, -advantage]


@pytest.mark.parametrize("options", OPTIONS)
def test_no_token_is_zero_with_a_graph_c01(options: dict[str, Any]) -> None:
    config = GrpoConfig(**options, beta=0.1)
    none: list[float] = []
    terms, gradient = loss_and_gradient(make_tokens(none, ref_logprobs=none), config)
    assert terms.loss.item() == 0.0
    assert gradient == []
    assert terms.where.tolist() == [-1, -1, -1]
    metrics = metrics_of(terms, config)
    assert all(value == 0.0 for value in metrics.values())
    assert terms.sums.tolist() == [0.0] * len(SUMS)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_all_masked_by_the_correction_is_zero_c01(mode: Any) -> None:
    config = GrpoConfig(vllm_importance_sampling_mode=mode)
    terms, gradient = loss_and_gradient(make_tokens([-1.0, -1.0], sampled_logprobs=[-9.0, -9.0]), config)
    assert terms.loss.item() == 0.0
    assert gradient == [0.0, 0.0]
    metrics = metrics_of(terms, config)
    assert metrics["correction/tokens"] == 1.0
    assert metrics["correction/effective"] == 0.0


def test_equal_rewards_and_the_penalty_c03() -> None:
    """Advantage 0: without a penalty the gradient is exactly 0; with one it is the penalty's, toward the reference."""
    columns: dict[str, Any] = {"advantages": [0.0, 0.0], "ref_logprobs": [-1.5, -0.5]}
    assert loss_and_gradient(make_tokens([-1.0, -1.0], **columns), GrpoConfig(beta=0.0))[1] == [0.0, 0.0]
    gradient = loss_and_gradient(make_tokens([-1.0, -1.0], **columns), GrpoConfig(beta=0.1))[1]
    assert gradient == pytest.approx([0.05, -0.05]), "down where it is above the reference, up where it is below"


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^beta > 0 needs ref_logprobs"):
        policy_loss(make_tokens([-1.0]), GrpoConfig(beta=0.1))


# What a person may set.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "epsilon_high to 1 or more"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1}, "epsilon does nothing with loss_type cispo"),
        ({"loss_type": "rloo", "importance_sampling_level": "sequence"}, "leave importance_sampling_level out"),
        (
            {"vllm_importance_sampling_mode": "none", "vllm_importance_sampling_clip_max": 2.0},
            "clip_min and clip_max do nothing",
        ),
        ({"vllm_importance_sampling_clip_min": 3.0}, "must be less than"),
        ({"loss_type": "bnpo"}, "loss_type"),
        ({"beta": -0.1}, "beta"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GrpoConfig(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"loss_type": "rloo"}, True),
        ({"importance_sampling_level": "sequence"}, True),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, True),
        ({"vllm_importance_sampling_mode": "token_mask"}, False),
    ],
)
def test_what_needs_whole_trajectories(options: dict[str, Any], expected: bool) -> None:
    assert GrpoConfig(**options).sequence_level is expected
