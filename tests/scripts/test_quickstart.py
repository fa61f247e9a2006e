"""The quickstart runs what is left to run, and says what stopped it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import learning
from scripts.quickstart import Stage, hold_choices, run_stages, stages
from scripts.run_folder import only_writer


def python_stage(name: str, code: str, result: Path) -> Stage:
    return Stage(name=name, command=[sys.executable, "-c", code], result=result)


def test_a_stage_that_is_done_is_skipped_and_one_that_fails_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done, made, never = tmp_path / "done", tmp_path / "made", tmp_path / "never"
    done.touch()
    planned = [
        python_stage("first", "raise SystemExit('it must not run again')", done),
        python_stage("second", f"import pathlib; pathlib.Path({str(made)!r}).touch()", made),
        python_stage("third", "raise SystemExit(3)", never),
        python_stage("fourth", f"import pathlib; pathlib.Path({str(never)!r}).touch()", never),
    ]

    with pytest.raises(ValueError, match="the stage 'third' ended with exit code 3; start the same command to go on"):
        run_stages(tmp_path, planned)

    assert f"first: done before ({done}; delete {tmp_path} to start over)" in capfd.readouterr().out
    assert made.exists()
    assert not never.exists(), "what comes after a failure must not run"


def test_stages_may_write_byte_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each stage compiles vLLM and torch again."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys; raise SystemExit(7 if sys.dont_write_bytecode else 8)"
    with pytest.raises(ValueError, match="exit code 8"):
        run_stages(tmp_path, [python_stage("one", code, tmp_path / "x")])


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    """What is there already would be taken for the other run's."""
    hold_choices(tmp_path, {"configs": "quickstart", "seed": 0})
    hold_choices(tmp_path, {"configs": "quickstart", "seed": 0})
    with pytest.raises(ValueError, match=r"holds a run with --configs quickstart, --seed 0; delete the folder"):
        hold_choices(tmp_path, {"configs": "quickstart", "seed": 1})


def test_a_result_that_was_made_from_an_earlier_one_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    planned = stages(tmp_path, configs="quickstart", seed=0, sandbox="auto")
    for stage in planned:
        stage.result.parent.mkdir(parents=True, exist_ok=True)
        stage.result.touch()
    grpo = next(stage for stage in planned if stage.name == "GRPO")
    grpo.result.unlink()
    with pytest.raises(ValueError, match=r"grpo/final is gone, and .*eval/grpo\.json was made from it"):
        run_stages(tmp_path, planned)


def test_sigterm_ends_all_processes_of_a_stage(tmp_path: Path) -> None:
    """The launcher's child too, and it may clean up first."""
    child = (
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'started')!r}).touch()\n"
        "try: time.sleep(600)\n"
        f"finally: pathlib.Path({str(tmp_path / 'clean')!r}).touch()"
    )
    launcher = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    code = (
        "import sys\nfrom scripts.console import run_main\nfrom scripts.quickstart import run_command\n"
        f"run_main(lambda: run_command('one', [sys.executable, '-c', {launcher!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; start the same command again to continue" in errors
    assert (tmp_path / "clean").exists()


def test_two_processes_never_write_one_run(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        code = (
            "from pathlib import Path; from scripts.run_folder import only_writer\n"
            f"only_writer(Path({str(tmp_path)!r})).__enter__()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"process {os.getpid()} is writing this run; wait for it, or end it: kill {os.getpid()}" in done.stderr
    with only_writer(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_the_benchmark_measures_whole_runs_only(tmp_path: Path) -> None:
    (tmp_path / "seed-1").mkdir()
    with pytest.raises(ValueError, match=r"seed-1 is there already; delete it"):
        learning(tmp_path, [0, 1])
    assert not (tmp_path / "seed-0").exists()
