"""The real loop, small: it learns something, and runs in two processes; kill -9 is in test_bench_resume.py."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.gate import check_batch
from data.jsonl import read_lines
from data.ledger import read_ledger
from data.rows import SAMPLE
from envs.base import Session
from envs.sandbox.base import Sandbox
from envs.types import Task
from scripts.bench_resume_env import EvenLength
from scripts.bench_resume_run import save_small_model, small_run
from tests.requirements import require
from train.config import HeldOutConfig
from train.metrics import read_metrics

STEPS = 6
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


def command(model: Path, folder: Path, engine: str = "transformers", launch: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launch, "-m", "scripts.bench_resume_run", str(model), str(folder), engine, str(STEPS)]


def finish(arguments: list[str], **environment: str) -> None:
    done = subprocess.run(arguments, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def whole_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(command(model, folder))
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def test_a_run_updates_the_weights_and_every_step_passed_the_gate(model: Path, whole_run: Path) -> None:
    rows = read_metrics(whole_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["tokens/trained"] for row in rows) > 0
    before, after = load_file(model / "model.safetensors"), weights(whole_run)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    ledger = read_ledger(whole_run / "ledger" / "completions.jsonl")
    samples = [
        sample for path in sorted((whole_run / "samples").glob("*.jsonl")) for sample in read_lines(path, SAMPLE)
    ]
    report = check_batch(samples, ledger)
    assert report.trained == sum(row["tokens/trained"] for row in rows)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_two_processes_train_like_one(model: Path, whole_run: Path, tmp_path: Path, engine: str) -> None:
    if engine == "vllm":
        require("vllm")
    # With --cpu, accelerate launches one process whatever --num_processes says; this form launches as many as asked.
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    launch += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
    finish(command(model, tmp_path, engine, launch), ACCELERATE_USE_CPU="true")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    if engine == "transformers":
        for name, tensor in weights(whole_run).items():
            torch.testing.assert_close(weights(tmp_path)[name], tensor, atol=1e-4, rtol=1e-3)


class Ungradable(EvenLength):
    """An environment with a fault: every trajectory is lost."""

    def session(self, task: Task, sandbox: Sandbox) -> Session:
        raise RuntimeError("the table is missing")


def test_a_step_that_is_lost_as_a_whole_ends_the_run(model: Path, tmp_path: Path) -> None:
    """Or every later one would be lost too, and the run would look finished."""
    with pytest.raises(ValueError, match=r"step 1: none of its 12 trajectories .*: RuntimeError: the table is missing"):
        asyncio.run(small_run(str(model), tmp_path, "transformers", STEPS, env=Ungradable()))
    assert not (tmp_path / "final").exists()
    assert (tmp_path / "trajectories" / "step-000001.jsonl").exists()


def test_a_run_is_evaluated_on_held_out_tasks_and_keeps_the_best_weights(model: Path, tmp_path: Path) -> None:
    config = HeldOutConfig(eval_steps=2, attempts=4)
    asyncio.run(small_run(str(model), tmp_path, "transformers", 4, max_staleness=1, evaluation=config))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    successes = {row["step"]: row["eval/success"] for row in rows if "eval/success" in row}
    assert successes.keys() == {2, 4}
    best = json.loads((tmp_path / "best" / "held_out.json").read_text())
    assert best["success"] == max(successes.values()) == successes[best["step"]]
    saved = load_file(tmp_path / "best" / "model.safetensors")
    expected = load_file(tmp_path / "checkpoints" / f"step-{best['step']:06d}" / "model.safetensors")
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert all(row["staleness/max"] <= 1 for row in rows)
    names = [completion.completion_id for completion in read_ledger(tmp_path / "ledger" / "completions.jsonl")]
    assert all(name.startswith("group-") for name in names), "what was sampled for an evaluation is never trained"
