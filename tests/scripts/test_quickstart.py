"""The quickstart runs what is left to run, and says what stopped it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import quickstart
from scripts.quickstart import Stage


def python_stage(name: str, code: str, result: Path) -> Stage:
    return Stage(name=name, command=[sys.executable, "-c", code], result=result)


def test_a_stage_that_is_done_is_skipped_and_one_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done, made, never = tmp_path / "done", tmp_path / "made", tmp_path / "never"
    done.touch()
    planned = [
        python_stage("first", "raise SystemExit('it must not run again')", done),
        python_stage("second", f"import pathlib; pathlib.Path({str(made)!r}).touch()", made),
        python_stage("third", "raise SystemExit(3)", never),
        python_stage("fourth", f"import pathlib; pathlib.Path({str(never)!r}).touch()", never),
    ]
    monkeypatch.setattr(quickstart, "stages", lambda *_, **__: planned)

    with pytest.raises(ValueError, match="the stage 'third' ended with exit code 3; start the same command to go on"):
        quickstart.quickstart(tmp_path, configs="quickstart", seed=0, sandbox="auto")

    assert f"first: done before ({done}; delete {tmp_path} to start over)" in capfd.readouterr().out
    assert made.exists()
    assert not never.exists(), "what comes after a failure must not run"


def test_stages_may_write_byte_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each stage compiles vLLM and torch again."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys; raise SystemExit(7 if sys.dont_write_bytecode else 8)"
    monkeypatch.setattr(quickstart, "stages", lambda *_, **__: [python_stage("one", code, tmp_path / "x")])
    with pytest.raises(ValueError, match="exit code 8"):
        quickstart.quickstart(tmp_path, configs="quickstart", seed=0, sandbox="auto")
