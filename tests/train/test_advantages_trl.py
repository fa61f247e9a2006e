"""Our advantages are those that TRL's trainers hand to their losses, for random rewards, some of them missing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from tests.random_samples import tiny_model
from tests.train.graded import graded
from train.advantages import step_advantages
from train.config import Baseline, GrpoConfig, ScaleRewards

GENERATIONS = 4
GROUPS = 3
PROMPTS = [prompt for prompt in "abc" for _ in range(GENERATIONS)]

pytestmark = pytest.mark.usefixtures("one_thread")


def trl_advantages(rewards: list[list[float | None]], make: Callable[..., Any], **arguments: Any) -> list[list[float]]:
    """For each list of rewards, what the trainer makes of a batch of `PROMPTS`; each completion is one token."""
    given: list[float | None] = []
    trainer = make(
        model=tiny_model(),
        reward_funcs=lambda completions, **_: list(given),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=AutoTokenizer.from_pretrained("models/embedded"),
        **arguments,
    )
    trainer.model.train()
    found = []
    for batch in rewards:
        given[:] = batch
        made = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS])
        found.append(made["advantages"].tolist())
    return found


def arguments_for(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(folder),
        num_generations=GENERATIONS,
        per_device_train_batch_size=len(PROMPTS),
        max_completion_length=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        beta=0.0,
        **more,
    )


def random_rewards() -> list[list[float | None]]:
    """Of all sizes, with groups that are all alike, and with none for one in eight and for a whole group but one."""
    rng = random.Random(5)
    batches: list[list[float | None]] = [[rng.gauss(0, 10 ** rng.uniform(-2, 2)) for _ in PROMPTS] for _ in range(6)]
    batches += [[rng.choice([0.0, 1.0]) for _ in PROMPTS] for _ in range(6)]
    batches += [[None if rng.random() < 1 / 8 else rng.choice([0.0, 0.5, 1.0]) for _ in PROMPTS] for _ in range(6)]
    batches.append([1.0] * GENERATIONS + [0.0] * GENERATIONS + [1.0, None, None, None])
    return batches


def ours(rewards: list[float | None], baseline: Baseline, scale_rewards: ScaleRewards) -> list[float]:
    """In TRL's order, with its 0 for what has no reward."""
    step = [graded(prompt, index % GENERATIONS, rewards[index]) for index, prompt in enumerate(PROMPTS)]
    found = step_advantages(step, GrpoConfig(baseline=baseline, scale_rewards=scale_rewards))
    return [found.get(trajectory.trajectory_id, (0.0,))[0] for trajectory in step]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_they_are_those_of_grpo(scale_rewards: ScaleRewards, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    arguments = arguments_for(GRPOConfig, tmp_path, scale_rewards=scale_rewards)
    rewards = random_rewards()
    for batch, theirs in zip(rewards, trl_advantages(rewards, GRPOTrainer, args=arguments), strict=True):
        assert ours(batch, "group", scale_rewards) == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_they_are_those_of_rloo(tmp_path: Path) -> None:
    from trl import RLOOConfig, RLOOTrainer

    arguments = arguments_for(RLOOConfig, tmp_path, normalize_advantages=False)
    rewards = random_rewards()
    for batch, theirs in zip(rewards, trl_advantages(rewards, RLOOTrainer, args=arguments), strict=True):
        assert ours(batch, "leave_one_out", "none") == pytest.approx(theirs, rel=1e-4, abs=1e-5)
