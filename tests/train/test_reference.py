"""The reference of the penalty: the model that the run started from, whether adapters are trained or all weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from data.types import TrainingSample
from rollouts.types import StopReason
from tests.random_samples import random_samples, tiny_learner, tiny_model
from tests.train.test_loss import make_group
from train.config import GrpoConfig, LoraSettings, OptimizerConfig
from train.learner import Learner
from train.lora import add_lora
from train.model import score
from train.reference import load_reference, reference_model
from train.step_samples import samples_and_metrics

IDS = [9, 30, 41, 12, 77, 25, 60]
LORA = LoraSettings(rank=4, alpha=8)
ADAPTERS, ALL_WEIGHTS = "adapters", "all weights"

pytestmark = pytest.mark.usefixtures("one_thread")


def make_learner(kind: str, *, beta: float, learning_rate: float = 1e-3) -> Learner:
    model: Any = tiny_model().train()
    reference = None
    if kind == ADAPTERS:
        model = add_lora(model, LORA, seed=0)
    else:
        reference = tiny_model().eval().requires_grad_(False)
    return Learner(
        model,
        Accelerator(cpu=True),
        config=GrpoConfig(beta=beta, max_micro_batch_tokens=128),
        optimizer=OptimizerConfig(learning_rate=learning_rate, max_grad_norm=1e9),
        temperature=1.0,
        reference=reference,
    )


def perturb(model: Any, by: float) -> None:
    """Move what is trained, at random."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += by * torch.randn(parameter.shape, generator=generator)


def samples(advantage: float, count: int = 12) -> list[TrainingSample]:
    return random_samples(count, seed=5, advantages=[advantage] * count)


@pytest.mark.parametrize("kind", [ADAPTERS, ALL_WEIGHTS])
def test_the_divergence_starts_at_zero_and_is_that_from_the_start(kind: str) -> None:
    learner = make_learner(kind, beta=0.1)
    batches = learner.pack(samples(1.0))
    assert learner.gradient(batches)["kl/max"] == 0.0
    perturb(learner.model, 0.05)
    assert learner.gradient(batches)["kl/mean"] > 1e-3
    with reference_model(learner.model, learner._reference) as reference:
        assert score(reference, IDS) == score(tiny_model(), IDS)


def test_adapters_are_trained_as_before_once_the_reference_was_asked() -> None:
    model = add_lora(tiny_model().train(), LORA, seed=0)
    perturb(model, 0.05)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    expected = score(model, IDS)
    with reference_model(model, None) as reference:
        assert score(reference, IDS) == score(tiny_model(), IDS)
        assert not torch.is_grad_enabled()
    assert score(model, IDS) == expected
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert set(before.values()) == {True, False}


def test_an_error_inside_leaves_the_adapters_on() -> None:
    model = add_lora(tiny_model(), LORA, seed=0)
    perturb(model, 0.05)
    expected = score(model, IDS)
    with pytest.raises(RuntimeError, match="out of memory"), reference_model(model, None):
        raise RuntimeError("out of memory")
    assert score(model, IDS) == expected


@pytest.mark.parametrize("kind", [ADAPTERS, ALL_WEIGHTS])
@pytest.mark.parametrize("times", [1, 8])
def test_a_step_of_the_penalty_alone_moves_toward_the_reference_c21(kind: str, times: int) -> None:
    """Advantage 0, from a perturbed policy."""
    learner = make_learner(kind, beta=0.5, learning_rate=1e-4)
    perturb(learner.model, 0.05)
    batches = learner.pack(samples(0.0))
    before = learner.gradient(batches)["kl/mean"]
    for _ in range(times):
        learner.update(batches)
    assert learner.gradient(batches)["kl/mean"] < before


@pytest.mark.parametrize("kind", [ADAPTERS, ALL_WEIGHTS])
def test_without_a_penalty_equal_rewards_move_nothing_c03(kind: str) -> None:
    """And with one they would, had they been trained: a dead group is not (below)."""
    learner = make_learner(kind, beta=0.0)
    perturb(learner.model, 0.05)
    learner.gradient(learner.pack(samples(0.0)))
    trained = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trained)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0]])
def test_a_dead_group_is_not_trained_whatever_the_penalty_c03(beta: float, rewards: list[float]) -> None:
    """Documented: it is in no batch, so neither the surrogate nor the KL moves weights; `groups/dead` counts it."""
    group = make_group(rewards, [StopReason.FINAL_ANSWER] * len(rewards))
    rows, metrics = samples_and_metrics([group], GrpoConfig(beta=beta), trained_version=0)
    assert metrics["groups/dead"] == 1.0
    assert make_learner(ALL_WEIGHTS, beta=beta).pack(rows) == []


def test_the_reference_is_loaded_from_the_folder_where_it_is_needed(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    device = torch.device("cpu")
    found = load_reference(str(tmp_path), config=GrpoConfig(beta=0.1), lora=LoraSettings(), device=device)
    assert found is not None
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert score(found, IDS) == score(tiny_model(), IDS)
    assert load_reference(str(tmp_path), config=GrpoConfig(), lora=LoraSettings(), device=device) is None
    assert load_reference(str(tmp_path), config=GrpoConfig(beta=0.1), lora=LORA, device=device) is None


def test_a_penalty_without_a_reference_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"^beta = 0\.1 needs a reference"):
        tiny_learner(tiny_model(), GrpoConfig(beta=0.1), OptimizerConfig())


# Several updates from one step.


def test_the_ratios_of_a_step_are_to_the_policy_before_its_first_update() -> None:
    """The first update has the ratio 1; the second is measured against the weights that the step began with."""
    learner = make_learner(ALL_WEIGHTS, beta=0.0, learning_rate=3e-3)
    rows = samples(1.0)
    updates = [learner.pack(rows[::2]), learner.pack(rows[1::2])]
    assert len(updates[1]) > 1
    expected = learner.old_logprobs(updates[1])
    first = learner.update(updates[0])
    assert first["ratio/mean"] == first["ratio/max"] == 1.0
    moved = learner.old_logprobs(updates[1])
    ratios = torch.cat([(now - old).exp() for now, old in zip(moved, expected, strict=True)])
    second = learner.update(updates[1], expected)
    assert second["ratio/mean"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert second["ratio/max"] == pytest.approx(ratios.max().item(), rel=1e-5)
    assert second["clip_ratio"] > 0
    again = make_learner(ALL_WEIGHTS, beta=0.0, learning_rate=3e-3)
    step = again.update_step(updates)
    assert step["ratio/mean"] == pytest.approx((1.0 + second["ratio/mean"]) / 2)
    assert step["ratio/max"] == pytest.approx(second["ratio/max"])
    for ours, theirs in zip(again.model.parameters(), learner.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("logprob", [-100.0, float("nan")])
def test_the_metrics_name_the_token_that_is_furthest_off_c20(logprob: float) -> None:
    rows = samples(1.0)
    learner = make_learner(ALL_WEIGHTS, beta=0.1)
    sample = rows[7]
    position = [place for place, trained in enumerate(sample.loss_mask) if trained][3]
    logprobs = list(sample.sampled_logprobs)
    logprobs[position] = logprob
    rows[7] = replace(sample, sampled_logprobs=tuple(logprobs))
    batches = learner.pack(rows)
    assert len(batches) > 1
    metrics = learner.gradient(batches)
    assert metrics["logprob_gap/max"] > 80 or math.isnan(logprob)
    completion = sample.completion_ids[sample.completion_index[position]]
    assert metrics["logprob_gap/max_token"] == f"t7: {completion}[{sample.completion_position[position]}]"
