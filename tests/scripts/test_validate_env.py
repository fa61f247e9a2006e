"""validate_env: a row for every task, exit 1 with a reason where a task is unsound, one line for bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollouts.config import EnvConfig
from scripts.open_env import open_env
from tests.envs.task_folders import SHARED, write_task
from tests.requirements import require


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.validate_env", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "160"},
    )


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.strip()]


def rows(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The table's rows as words, without the titles."""
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["task", "solution", "empty", "seconds", "sandbox"]
    return [line.split() for line in lines[1:]]


def test_a_sound_task_has_a_row() -> None:
    require("bwrap")
    done = run("task_folder", "--task", "merge-config", "--backend", "bubblewrap")
    assert done.returncode == 0, done.stderr
    (name, solution, empty, _, sandbox), last = rows(done)
    assert (name, solution, empty, sandbox) == ("merge-config", "1", "0", "defaults")
    assert " ".join(last) == "1 tasks: every solution scores 1, every empty attempt 0"
    assert errors(done) == []


def test_a_generated_environment_is_checked_through_the_same_protocol() -> None:
    require("bwrap")
    done = run("lookup_calc", "--backend", "bubblewrap")
    assert done.returncode == 0, done.stderr
    assert "20 tasks: every solution scores 1, every empty attempt 0" in done.stdout


def test_unsound_tasks_are_named_with_their_reason(tmp_path: Path) -> None:
    require("bwrap")
    gift = "echo 1 >/logs/verifier/reward.txt\n"
    write_task(tmp_path, {"solution/solve.sh": "echo wrong >answer.txt\necho seen >&2"}, name="a-wrong-solution")
    write_task(tmp_path, {"tests/test.sh": gift, "task.toml": SHARED}, name="b-gift")
    write_task(tmp_path, {"tests/test.sh": "echo broken tests >&2", "task.toml": SHARED}, name="c-no-reward")
    write_task(tmp_path, {"environment/Dockerfile": "FROM agentgrad-sandbox:1\nRUN true\nWORKDIR /app"}, name="d-image")
    write_task(tmp_path, name="e-sound")
    done = run(str(tmp_path), "--backend", "bubblewrap")
    assert done.returncode == 1
    table = {name: (solution, empty, " ".join(sandbox)) for name, solution, empty, _, *sandbox in rows(done)}
    assert table["a-wrong-solution"] == ("0", "0", "defaults")
    assert table["b-gift"] == ("1", "1", "defaults")
    assert table["c-no-reward"] == ("0", "0", "defaults")
    assert table["d-image"] == ("-", "-", "user root, writable root file system")
    assert table["e-sound"] == ("1", "0", "defaults")
    wrong, gift_line, broken, image = errors(done)
    assert wrong.startswith("error: task a-wrong-solution: its solution scores 0, not 1")
    assert "the last tool result: seen" in wrong
    assert gift_line == "error: task b-gift: an attempt that does nothing scores 1, not 0"
    assert "no_reward_file" in broken
    assert "the tests: broken tests" in broken
    assert image.startswith("error: task d-image: cannot run here: bubblewrap: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing",), "error: there is no environment 'nothing' and no such folder"),
        (("lookup_calc", "--folder", "x"), "error: --folder goes with task_folder"),
        (("lookup_calc", "--task", "x"), "error: --task names a task folder"),
        (("task_folder", "--folder", "none"), "error: task_folder: none: no such folder"),
        (("task_folder", "--task", "none"), "error: task_folder: there is no task 'none'"),
        (("envs/tasks", "--folder", "envs/tasks"), "error: --folder goes with task_folder; the name envs/tasks is"),
        (("envs/tasks/merge-config",), "error: task_folder: envs/tasks/merge-config is one task"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    require("bwrap")
    done = run(*arguments, "--backend", "bubblewrap")
    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert len(done.stderr.splitlines()) == 1


def test_help_shows_an_example() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "example: python -m scripts.validate_env task_folder" in done.stdout


def test_a_key_of_another_environment_is_refused() -> None:
    for values in (
        {"name": "lookup_calc", "folder": "x"},
        {"name": "task_folder", "max_calls": 2},
        {"name": "task_folder", "call_weights": (1, 2, 3)},
    ):
        with pytest.raises(ValidationError, match="take it out"):
            EnvConfig.model_validate(values)


def test_the_configured_environment_is_opened(tmp_path: Path) -> None:
    write_task(tmp_path)
    assert open_env(EnvConfig()).name == "lookup_calc"
    env = open_env(EnvConfig(name="task_folder", folder=str(tmp_path)))
    assert env.name == "task_folder"
    assert open_env(EnvConfig(name="task_folder")).tasks("train", 1, 0)
