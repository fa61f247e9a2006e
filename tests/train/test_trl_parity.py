"""Our loss and gradient are TRL's on the same samples: live groups, tool tokens masked. Through whole steps of its
trainer (`GRPOTrainer(rollout_func=…)`, two accumulated micro-batches), and in its loss alone, off policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from data.types import TrainingSample
from tests.random_samples import random_samples, tiny_model
from tests.train.loss_cases import textbook_correction
from tests.train.trl_peer import (
    all_logprobs,
    assert_same,
    gradients,
    make_learner,
    make_trainer,
    moved_model,
    rollout_of,
    trl_inputs,
)
from train.advantages import group_advantages
from train.config import GrpoConfig

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0]
GENERATIONS = 4
TEMPERATURE = 0.7

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "importance_sampling_level": "sequence"},
]
TOKEN_LOSSES = LOSSES[:4]
CORRECTIONS: list[dict[str, Any]] = [
    {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
    {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.8},
    {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.2},
    {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.2},
]
NONE = {"vllm_importance_sampling_mode": "none"}


def words(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


@cache
def samples_of(engine: str) -> tuple[TrainingSample, ...]:
    """Two live groups. Sampled by the model itself ("exact"), or by one near it, as engines are ("other")."""
    advantages = [
        advantage
        for first in range(0, len(REWARDS), GENERATIONS)
        for advantage in group_advantages(REWARDS[first : first + GENERATIONS])
    ]
    model = moved_model(1, 0.01 if engine == "other" else 0.0)
    samples = []
    for sample in random_samples(len(REWARDS), advantages=advantages):
        logprobs = all_logprobs(model, sample, temperature=TEMPERATURE).tolist()
        kept = [value if trained else 0.0 for value, trained in zip(logprobs, sample.loss_mask, strict=True)]
        samples.append(replace(sample, sampled_logprobs=tuple(kept)))
    return tuple(samples)


def our_config(options: dict[str, Any]) -> GrpoConfig:
    cispo = options["loss_type"] == "cispo"
    bounds: dict[str, Any] = {"epsilon_high": 1.1} if cispo else {"epsilon": 0.2, "epsilon_high": 0.2}
    keys: dict[str, Any] = {"max_micro_batch_tokens": 150} | bounds | options
    return GrpoConfig(**keys)


def ours(
    samples: Sequence[TrainingSample], options: dict[str, Any], *, old: Any = None, reference: Any = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metrics and gradient of our step; `old` is the policy that its ratios are to, unless it is the model's own."""
    config = our_config(options)
    learner = make_learner(tiny_model(), config, temperature=TEMPERATURE, reference=reference)
    batches = learner.pack(samples)
    assert len(batches) > 1
    before = None
    if old is not None:
        before = make_learner(old, our_config({"loss_type": "dapo"}), temperature=TEMPERATURE).old_logprobs(batches)
    return learner.gradient(batches, before), gradients(learner.model)


# Whole steps.


def trl_step(
    samples: Sequence[TrainingSample], options: dict[str, Any], folder: Path, reference: Any = None
) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the gradient that TRL's trainer hands to its optimizer. Its correction needs vLLM for nothing but
    sampling, which is done here: it is switched on behind the check for an engine."""
    found: dict[str, Tensor] = {}
    losses: list[float] = []
    config = our_config(options)
    trainer = make_trainer(
        "GRPO", folder, rewards=REWARDS, rollout=rollout_of(samples), temperature=TEMPERATURE,
        loss_type=config.loss_type, importance_sampling_level=config.importance_sampling_level,
        epsilon=config.epsilon, epsilon_high=config.epsilon_high, scale_rewards="group",
        beta=config.beta, reference=reference,
    )  # fmt: skip
    if config.vllm_importance_sampling_mode != "none":
        trainer.use_vllm, trainer._last_loaded_step = True, 0
        trainer.vllm_importance_sampling_mode = config.vllm_importance_sampling_mode
        trainer.vllm_importance_sampling_clip_max = config.vllm_importance_sampling_clip_max
        trainer.vllm_importance_sampling_clip_min = config.vllm_importance_sampling_clip_min or None

    class Capture(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found.update(gradients(trainer.model))

    compute_loss = trainer._compute_loss

    def keep_loss(model: Any, inputs: Any) -> Tensor:
        loss = compute_loss(model, inputs)
        losses.append(loss.item())
        return loss

    trainer._compute_loss = keep_loss
    trainer.add_callback(Capture())
    trainer.train()
    return sum(losses), found


@pytest.mark.parametrize("options", LOSSES, ids=words)
def test_a_step_is_that_of_trl(options: dict[str, Any], tmp_path: Path) -> None:
    loss, expected = trl_step(samples_of("exact"), options | NONE, tmp_path)
    metrics, found = ours(samples_of("exact"), options)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert_same(found, expected)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=words)
@pytest.mark.parametrize("options", [{"loss_type": "grpo"}, {"loss_type": "cispo"}], ids=words)
def test_a_corrected_step_is_that_of_trl(options: dict[str, Any], correction: dict[str, Any], tmp_path: Path) -> None:
    loss, expected = trl_step(samples_of("other"), options | correction, tmp_path)
    metrics, found = ours(samples_of("other"), options | correction)
    assert 0 < metrics["correction/tokens"] < 1, "on both sides of the bounds"
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert_same(found, expected)


@pytest.mark.parametrize("options", TOKEN_LOSSES, ids=words)
def test_a_penalised_step_is_that_of_trl(options: dict[str, Any], tmp_path: Path) -> None:
    options = options | NONE | {"beta": 0.3}
    loss, expected = trl_step(samples_of("exact"), options, tmp_path, reference=moved_model(2, 0.02))
    metrics, found = ours(samples_of("exact"), options, reference=moved_model(2, 0.02))
    assert metrics["kl/mean"] > 0.01
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert_same(found, expected)


# The loss alone, with an old policy, an engine and a reference that all differ.


@pytest.fixture(scope="module")
def grpo_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("grpo")
    return make_trainer("GRPO", folder, rewards=REWARDS, rollout=rollout_of([]), temperature=TEMPERATURE)


def trl_loss(trainer: Any, samples: Sequence[TrainingSample], config: GrpoConfig) -> tuple[float, dict[str, Tensor]]:
    columns = {
        "old_per_token_logps": [all_logprobs(moved_model(3, 0.01), s, temperature=TEMPERATURE) for s in samples],
        "ref_per_token_logps": [all_logprobs(moved_model(2, 0.02), s, temperature=TEMPERATURE) for s in samples],
    }
    ratios = []
    for sample, old in zip(samples, columns["old_per_token_logps"], strict=True):
        ratio, mask = torch.ones(len(sample)), torch.tensor(sample.loss_mask)
        ratio[mask] = textbook_correction((old - torch.tensor(sample.sampled_logprobs))[mask], config).float()
        ratios.append(ratio)
    inputs = trl_inputs(samples, columns | {"importance_sampling_ratio": ratios})
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.loss_type, trainer.importance_sampling_level = config.loss_type, config.importance_sampling_level
    trainer.epsilon_low, trainer.epsilon_high, trainer.beta = config.epsilon, config.epsilon_high, config.beta
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.model.train().zero_grad()
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model)


OFF_POLICY = [
    *(loss | NONE | {"beta": beta} for loss in TOKEN_LOSSES for beta in (0.0, 0.3)),
    *(loss | correction for loss in TOKEN_LOSSES for correction in CORRECTIONS),
    # TRL sends the gradient of a sequence's ratio through every token, also where correction or penalty differ from
    # token to token; ours keeps each token's own. The two are the same where those are of the sequence.
    *(loss | correction for loss in LOSSES[4:] for correction in (NONE, *CORRECTIONS[2:])),
]


@pytest.mark.parametrize("options", OFF_POLICY, ids=words)
def test_an_off_policy_loss_is_that_of_trl(options: dict[str, Any], grpo_trainer: Any) -> None:
    samples, config = samples_of("other"), our_config(options)
    loss, expected = trl_loss(grpo_trainer, samples, config)
    metrics, found = ours(samples, options, old=moved_model(3, 0.01), reference=moved_model(2, 0.02))
    assert metrics["ratio/max"] > 1.05
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert_same(found, expected)
    theirs = grpo_trainer._metrics["train"]
    assert metrics["entropy"] == pytest.approx(theirs["entropy"][0], rel=1e-5)
    if config.loss_type != "cispo" and config.importance_sampling_level == "token":
        for side in ("low", "high"):
            assert metrics[f"clip_ratio/{side}"] == pytest.approx(theirs[f"clip_ratio/{side}_mean"][0])
            assert metrics[f"clip_ratio/{side}"] > 0


# RLOO: its trainer knows no tool tokens and no correction, so the samples are of one turn.


def one_turn(sample: TrainingSample) -> TrainingSample:
    """The sample up to the end of its first completion."""
    end = sample.completion_index.index(0) + sample.completion_index.count(0)
    names = [name for name in TrainingSample.__slots__ if isinstance(getattr(sample, name), tuple)]
    cut = {name: getattr(sample, name)[:end] for name in names if name != "completion_ids"}
    return replace(sample, **cut, completion_ids=sample.completion_ids[:1])


def test_rloo_is_that_of_trl(tmp_path: Path) -> None:
    samples = [one_turn(sample) for sample in samples_of("exact")]
    old = moved_model(3, 0.01)
    trainer = make_trainer("RLOO", tmp_path, rewards=REWARDS, rollout=rollout_of([]), temperature=TEMPERATURE)
    rows = [all_logprobs(old, sample, temperature=TEMPERATURE) for sample in samples]
    masks = [torch.tensor(sample.loss_mask) for sample in samples]
    inputs = trl_inputs(samples, {})
    inputs["old_logps"] = torch.stack([row[mask].sum() for row, mask in zip(rows, masks, strict=True)])
    trainer.model.train().zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    metrics, found = ours(samples, {"loss_type": "rloo", "max_micro_batch_tokens": 60} | NONE, old=old)
    assert metrics["ratio/max"] > 1.05
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert_same(found, gradients(trainer.model))
