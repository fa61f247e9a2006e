"""Which tasks a step gets, and sizes that could not train are refused before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from envs.types import Task
from tests.random_samples import random_samples
from train.config import GrpoConfig
from train.group_feed import task_at
from train.grpo import check_sizes
from train.step_samples import mini_batches


def make_tasks(count: int) -> list[Task]:
    return [Task(task_id=str(index), prompt="?") for index in range(count)]


def ids(count: int, indices: range, seed: int) -> list[str]:
    return [task_at(make_tasks(count), index, seed).task_id for index in indices]


def test_another_process_has_the_same_order_c13() -> None:
    """Its strings hash in another way."""
    code = "from tests.train.test_grpo_tasks import ids\nprint(*ids(20, range(6, 12), 0))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ids(20, range(6, 12), 0), done.stderr


def test_epochs_and_seeds_have_their_own_order() -> None:
    first, second = ids(20, range(20), 0), ids(20, range(20, 40), 0)
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != ids(20, range(20), 1)


def test_sizes_that_fit_pass() -> None:
    check_sizes(GrpoConfig(tasks_per_step=4, max_micro_batch_tokens=512), make_tasks(4), max_context_tokens=512)


@pytest.mark.parametrize("count", [0, 3])
def test_too_few_tasks_are_one_clear_error_c18(count: int) -> None:
    message = (
        f"^the task set has {count} tasks, fewer than tasks_per_step = 8; "
        r"lower grpo\.tasks_per_step or raise grpo\.num_tasks$"
    )
    with pytest.raises(ValueError, match=message):
        check_sizes(GrpoConfig(tasks_per_step=8), make_tasks(count), max_context_tokens=16)


def test_a_micro_batch_smaller_than_a_trajectory_is_one_clear_error_c18() -> None:
    message = (
        r"^grpo\.max_micro_batch_tokens = 256 is smaller than rollout\.engine\.max_context_tokens = 1024: "
        "the longest trajectory would not fit$"
    )
    with pytest.raises(ValueError, match=message):
        check_sizes(GrpoConfig(max_micro_batch_tokens=256), make_tasks(8), max_context_tokens=1024)


@pytest.mark.parametrize(
    "change",
    [{"num_generations": 1}, {"tasks_per_step": 0}, {"max_steps": 0}, {"num_tasks": 0}, {"epsilon": 0.0}],
    ids=lambda change: next(iter(change)),
)
def test_numbers_that_cannot_train_are_refused_by_name_c18(change: dict[str, float]) -> None:
    """A group of one has no baseline; a run of no steps would be a success that did nothing."""
    with pytest.raises(ValidationError, match=next(iter(change))):
        GrpoConfig.model_validate(change)


def test_mini_batches_share_all_samples_out_once_and_split_every_group() -> None:
    samples = random_samples(16)  # two groups of eight siblings
    parts = mini_batches(samples, 4)
    assert sorted(sample.trajectory_id for part in parts for sample in part) == sorted(s.trajectory_id for s in samples)
    first_group = {sample.trajectory_id for sample in samples[:8]}
    assert [sum(sample.trajectory_id in first_group for sample in part) for part in parts] == [2, 2, 2, 2]
    assert mini_batches(samples, 1) == [samples]


def test_more_mini_batches_than_trajectories_are_one_clear_error() -> None:
    config = GrpoConfig(tasks_per_step=2, num_generations=4, num_mini_batches=9)
    with pytest.raises(ValueError, match=r"^grpo\.num_mini_batches = 9 is more than the 8 trajectories of a step$"):
        check_sizes(config, make_tasks(8), max_context_tokens=512)
