"""Runs that are killed at random lose, repeat and change nothing; and the benchmark would say so if they did (C13)."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_resume import run_faults
from scripts.bench_resume_run import save_small_model, small_run

STEPS = 3


class Published:
    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, data: dict[str, object], step: int) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")

    def finish(self) -> None:
        """Nothing is open."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    model = save_small_model(folder / "model")
    run = folder / "run"
    asyncio.run(
        small_run(str(model), run, "transformers", STEPS, max_staleness=1, run=Published(folder / "published.jsonl"))
    )
    (folder / "published.jsonl").rename(run / "published.jsonl")
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def test_killed_runs_end_as_one_that_nobody_killed_c13() -> None:
    command = [sys.executable, "-m", "scripts.bench", "resume", "--kills", "8", "--steps", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["kills"], result["faults"], result["passed"]) == (8, [], True)
    assert result["largest_weight_difference"] == 0.0


def test_a_whole_run_has_no_fault(run: Path) -> None:
    assert run_faults(run, STEPS) == []


def test_a_step_that_is_there_twice_is_found(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines, lines[-1]]))
    assert "metrics.jsonl has the steps" in run_faults(run, STEPS)[0]


def test_a_group_that_is_trained_twice_is_found(run: Path) -> None:
    shutil.copy(run / "samples" / "step-000001.jsonl", run / "samples" / "step-000004.jsonl")
    faults = run_faults(run, STEPS)
    assert any(fault.startswith("groups in the steps' samples: ") for fault in faults)
    assert any("is in the batch twice" in fault for fault in faults)


def test_a_step_whose_samples_are_lost_is_found(run: Path) -> None:
    (run / "samples" / "step-000002.jsonl").unlink()
    assert any("was sampled, but is neither" in fault for fault in run_faults(run, STEPS))


def test_a_step_that_was_not_published_is_found(run: Path) -> None:
    path = run / "published.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert run_faults(run, STEPS)[0].startswith("published steps: ")
