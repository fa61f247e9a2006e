"""Our gradient is TRL's on the same samples: `GRPOTrainer(rollout_func=…)`, live groups, token and sequence means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from data.types import TrainingSample
from tests.random_samples import random_samples, tiny_model
from train.advantages import group_advantages
from train.config import GrpoConfig, OptimizerConfig
from train.learner import Learner
from train.model import score

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0]
GENERATIONS = 4


def on_policy_samples(model: Any) -> list[TrainingSample]:
    """Samples whose sampled logprobs are the model's own, with the advantages of two live groups."""
    advantages = [
        advantage or 0.0
        for first in range(0, len(REWARDS), GENERATIONS)
        for advantage in group_advantages(REWARDS[first : first + GENERATIONS], scale_rewards=True)
    ]
    samples = random_samples(len(REWARDS), advantages=advantages)
    exact = []
    for sample in samples:
        logprobs = [0.0, *score(model, list(sample.token_ids))]
        exact.append(
            replace(
                sample,
                sampled_logprobs=tuple(
                    logprob if trained else 0.0 for logprob, trained in zip(logprobs, sample.loss_mask, strict=True)
                ),
            )
        )
    return exact


def trl_gradient(samples: list[TrainingSample], loss_type: str, folder: Path) -> dict[str, torch.Tensor]:
    """The gradient that TRL's trainer hands to its optimizer, in two accumulated micro-batches."""
    from trl import GRPOConfig, GRPOTrainer

    prompt_lengths = [sample.loss_mask.index(True) for sample in samples]
    gradients: dict[str, torch.Tensor] = {}
    model = tiny_model()

    class Capture(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gradients.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rows = list(zip(samples, prompt_lengths, strict=True))
        return {
            "prompt_ids": [list(sample.token_ids[:n]) for sample, n in rows],
            "completion_ids": [list(sample.token_ids[n:]) for sample, n in rows],
            "logprobs": [list(sample.sampled_logprobs[n:]) for sample, n in rows],
            "env_mask": [[int(trained) for trained in sample.loss_mask[n:]] for sample, n in rows],
        }

    arguments = GRPOConfig(
        output_dir=str(folder),
        loss_type=loss_type,
        num_generations=GENERATIONS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_completion_length=128,
        max_steps=1,
        max_grad_norm=0.0,
        beta=0.0,
        temperature=1.0,
        scale_rewards="group",
        shuffle_dataset=False,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: REWARDS,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=AutoTokenizer.from_pretrained("models/embedded"),
        rollout_func=rollout_func,
        callbacks=[Capture()],
    )
    trainer.train()
    return gradients


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_gradient_is_that_of_trl(loss_type: Any, tmp_path: Path) -> None:
    model = tiny_model().eval()
    samples = on_policy_samples(model)
    expected = trl_gradient(samples, loss_type, tmp_path)
    learner = Learner(
        tiny_model(),
        Accelerator(cpu=True),
        config=GrpoConfig(loss_type=loss_type, epsilon=0.2, epsilon_high=0.2, max_micro_batch_tokens=150),
        optimizer=OptimizerConfig(),
        temperature=1.0,
        pad_token_id=1,
    )
    batches = learner.pack(samples)
    assert len(batches) > 1
    learner.gradient(batches)
    ours = {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, f"{name}: TRL's gradient is zero, nothing is compared"
        torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
