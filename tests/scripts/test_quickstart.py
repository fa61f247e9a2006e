"""The quickstart runs what is left to run, and says what stopped it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.bench_learning import learning
from scripts.quickstart import Stage, hold_choices, run_stages, stages
from scripts.run_folder import only_writer


def python_stage(name: str, code: str, result: Path) -> Stage:
    return Stage(name=name, command=[sys.executable, "-c", code], result=result, folder=result)


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

    with pytest.raises(ValueError, match=r"the stage 'third' ended with exit code 3 .*; start the same"):
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
    choices, others = {"configs": "quickstart", "seed": 0}, {"configs": "quickstart", "seed": 1}
    stage = python_stage("one", "", tmp_path / "result")
    hold_choices(tmp_path, others, [stage])  # nothing was made with them
    hold_choices(tmp_path, choices, [stage])
    stage.result.touch()
    hold_choices(tmp_path, choices, [stage])
    with pytest.raises(ValueError, match=r"holds a run with --configs quickstart, --seed 0; delete the folder"):
        hold_choices(tmp_path, others, [stage])
    (tmp_path / "quickstart.json").unlink()
    with pytest.raises(ValueError, match=r"result is there, but not .*quickstart\.json; delete"):
        hold_choices(tmp_path, choices, [stage])


def test_what_was_made_from_an_earlier_result_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    planned = stages(tmp_path, configs="quickstart", seed=0, sandbox="auto")
    for stage in planned:
        stage.result.parent.mkdir(parents=True, exist_ok=True)
        stage.result.touch()
    (tmp_path / "sft" / "final").unlink()  # its checkpoints would be
    (tmp_path / "grpo" / "final").unlink()  # a half-done run would go on with another start
    old = ", ".join(str(tmp_path / name) for name in ("eval/sft.json", "grpo", "eval/grpo.json"))
    with pytest.raises(
        ValueError, match=re.escape(f"sft/final is gone, and what was made from it is there: delete {old}")
    ):
        run_stages(tmp_path, planned)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"configs": "smolm2", "seed": 0}, "no configs/data_smolm2.toml"),
        ({"configs": "smollm2", "seed": -1}, "0 or more"),
    ],
)
def test_a_typo_is_said_before_anything_is_written(tmp_path: Path, choice: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stages(tmp_path, sandbox="auto", **choice)


LAUNCHED = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "started").touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(2)
    (folder / "clean").touch()
"""


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP, signal.SIGINT]])
def test_a_signal_ends_all_processes_of_a_stage(tmp_path: Path, signals: list[signal.Signals]) -> None:
    """The launcher's child has time to clean up, whatever comes meanwhile, and nobody prints a traceback."""
    launcher = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {LAUNCHED!r}, {str(tmp_path)!r}]).wait()"
    )
    code = (
        "import sys\nfrom scripts.console import run_main\nfrom scripts.quickstart import run_command\n"
        f"run_main(lambda: run_command('one', [sys.executable, '-c', {launcher!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (tmp_path / "clean").exists()
    assert errors == "interrupted; started again, the same command begins from the start\n"


def test_under_nohup_the_end_of_the_terminal_ends_nothing() -> None:
    code = (
        "import signal, sys\nfrom scripts.quickstart import run_command\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "run_command('one', [sys.executable, '-c', 'import os, signal; os.kill(os.getppid(), signal.SIGHUP)'])"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_sandbox_that_cannot_be_had_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.try_sandbox", "docker"],
        env=os.environ | {"DOCKER_HOST": "unix:///tmp/none.sock"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: docker: no daemon answers at unix:///tmp/none.sock")


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
