"""Bad input gives one clear line and exit code 2, before anything slow is loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"TRANSFORMERS_VERBOSITY": "error"} | environment
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, env=variables
    )


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a person reads."""
    assert done.returncode == 2, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[-1].startswith("error: "), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return lines[-1]


GRPO = ("scripts.run_grpo", "--config", "configs/grpo_quickstart.toml", "--wandb.mode", "disabled")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--grpo.num_tasks", "3"), "fewer than tasks_per_step"),
        (("--grpo.max_micro_batch_tokens", "64"), "the longest trajectory would not fit"),
        (("--model", "models/none"), "model models/none: no such folder"),
    ],
)
def test_sizes_and_folders(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in error_line(run(*GRPO, "--output_dir", str(tmp_path / "run"), *arguments))


def test_a_dry_run_without_its_model_says_so_and_nothing_else(tmp_path: Path) -> None:
    done = run(*GRPO, "--output_dir", str(tmp_path / "run"), "--model", "models/none", "--dry-run")
    assert error_line(done).endswith("run first what makes it (run_sft, run_grpo), or name another with --model")
    assert done.stdout == ""


def test_a_model_folder_without_a_chat_template(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree("models/embedded", folder)
    (folder / "chat_template.jinja").unlink()
    line = error_line(run(*GRPO, "--output_dir", str(tmp_path / "run"), "--model", str(folder)))
    assert f"model {folder}: no chat template" in line


def test_d16_no_docker_daemon(tmp_path: Path) -> None:
    """Case D16: a daemon that is off is one line."""
    arguments = ("--sandbox.backend", "docker", "--output", str(tmp_path / "d.jsonl"))
    done = run(
        "scripts.make_data", "--config", "configs/data_quickstart.toml", *arguments, DOCKER_HOST="unix:///tmp/none.sock"
    )
    assert "docker" in error_line(done).lower()
    assert not (tmp_path / "d.jsonl").exists()


def test_a_context_that_the_prompt_fills(tmp_path: Path) -> None:
    """Each attempt would end without a sampled token, and count as a failure of the model."""
    arguments = ("--output", str(tmp_path / "e.json"), "--rollout.engine.max_context_tokens", "100")
    line = error_line(run("scripts.run_eval", "--config", "configs/eval_quickstart.toml", *arguments))
    assert re.search(r"max_context_tokens is 100, but a prompt alone \(heldout-0-0\) has 1\d\d tokens", line)
    assert not (tmp_path / "e.json").exists()


def test_an_unknown_key_is_one_line() -> None:
    done = run("scripts.run_eval", "--config", "configs/eval_quickstart.toml", "--attempt", "3")
    assert "--attempt: unknown key; did you mean --attempts?" in error_line(done)
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_demonstration_file(tmp_path: Path) -> None:
    arguments = ("--sft.data", str(tmp_path / "none.jsonl"), "--output_dir", str(tmp_path / "run"))
    done = run("scripts.run_sft", "--config", "configs/sft_quickstart.toml", "--model", "models/embedded", *arguments)
    assert "none.jsonl" in error_line(done)


@pytest.mark.parametrize("command", ["make_data", "run_eval"])
@pytest.mark.parametrize("folder", ["/proc/none", "{tmp}/file"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, command: str, folder: str) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    output = f"{folder.format(tmp=tmp_path)}/out.json"
    config = {"make_data": "configs/data_quickstart.toml", "run_eval": "configs/eval_quickstart.toml"}[command]
    done = run(f"scripts.{command}", "--config", config, "--output", output)
    assert f"output {output} cannot be written there: " in error_line(done)
    assert len(done.stderr.splitlines()) == 1
    if folder.startswith("{tmp}"):
        assert error_line(done).endswith(f"{tmp_path / 'file'}: this is a file, where a folder should be")
