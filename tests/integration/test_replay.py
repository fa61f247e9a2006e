"""A run trained again from its own dump has the same weights, and a dump that was changed is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from data.jsonl import read_lines
from data.rows import SAMPLE, write_samples
from scripts.bench_resume_run import SMALL, save_small_model, small_run
from tests.train.mask_rows import changed
from train.metrics import read_metrics

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(small_run(str(model), folder, "transformers", STEPS, max_staleness=1))
    return folder


def replayed(model: Path, run: Path, output: Path) -> subprocess.CompletedProcess[str]:
    settings = {
        "model": str(model),
        "output_dir": str(output),
        "replay": str(run),
        "grpo": SMALL | {"max_steps": STEPS, "max_staleness": 1},
        "optimizer": {"learning_rate": 3e-3},
        "rollout": {"engine": {"kind": "transformers", "max_context_tokens": 128}},
        "wandb": {"mode": "disabled"},
    }
    config = output.with_suffix(".toml")
    config.write_text(tomli_w.dumps(settings))
    command = [sys.executable, "-m", "scripts.run_grpo", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_dump_gives_the_same_weights(model: Path, run: Path, tmp_path: Path) -> None:
    done = replayed(model, run, tmp_path / "again")
    assert done.returncode == 0, done.stderr[-2000:]
    expected, again = (load_file(folder / "final" / "model.safetensors") for folder in (run, tmp_path / "again"))
    assert expected.keys() == again.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-5, atol=1e-6)
    rows, replayed_rows = (read_metrics(folder / "metrics.jsonl") for folder in (run, tmp_path / "again"))
    assert any("loss" in row for row in rows)
    for row, other in zip(rows, replayed_rows, strict=True):
        assert row.get("loss") == pytest.approx(other.get("loss"), abs=1e-6)


def test_a_dump_that_was_changed_is_refused(model: Path, run: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    (bad / "ledger").mkdir(parents=True)
    (bad / "ledger" / "completions.jsonl").write_bytes((run / "ledger" / "completions.jsonl").read_bytes())
    rows = list(read_lines(run / "samples" / "step-000001.jsonl", SAMPLE))
    place = next(index for index, version in enumerate(rows[0].policy_version) if version >= 0)
    write_samples(
        bad / "samples" / "step-000001.jsonl",
        [changed(rows[0], "token_ids", place, 3 + rows[0].token_ids[place]), *rows[1:]],
    )
    done = replayed(model, bad, tmp_path / "again")
    assert done.returncode == 1
    assert "step-000001.jsonl: gate: trajectory" in done.stderr
    empty = replayed(model, tmp_path / "nothing", tmp_path / "again2")
    assert empty.returncode == 2
    assert "has no samples/step-NNNNNN.jsonl" in empty.stderr
