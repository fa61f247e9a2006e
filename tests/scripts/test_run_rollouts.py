"""The worker: killed or interrupted anywhere, a second start gives each (task, sibling) exactly once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.record import Record, read_settings, read_trajectories, write_trajectories
from rollouts.types import StopReason, Trajectory
from scripts.replay_rollouts import replay_file
from scripts.run_rollouts import recorded_settings, run_rollouts, take_stock
from scripts.settings import EvalSettings, RolloutSettings, load_settings, resolved
from tests.rollouts.test_record import full_disk
from tests.rollouts.workshop import Workshop
from tests.scripts.test_bad_input import error_line, run

ARGUMENTS = (
    *("--config", "configs/eval_quickstart.toml", "--rollout.engine.kind", "transformers"),
    *("--evaluation.num_tasks", "10", "--attempts", "3", "--rollout.engine.max_concurrent", "4"),
    *("--rollout.sandbox.backend", "local", "--rollout.limits.max_turn_tokens", "8"),
)
ALL = {(f"heldout-0-{task}", sibling) for task in range(10) for sibling in range(3)}


def settings(output: Path, *more: str) -> RolloutSettings:
    return load_settings(RolloutSettings, [*ARGUMENTS, "--output", str(output), *more])


def lost(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, stop_reason=StopReason.SANDBOX_ERROR, reward=None, error="the disk was full")


def trajectory(task_id: str, sibling: int) -> Trajectory:
    return Trajectory(
        trajectory_id=f"evaluation/{task_id}/{sibling}",
        task_id=task_id,
        group_id=f"evaluation/{task_id}",
        sibling_index=sibling,
        streams=(),
        turns=(),
        stop_reason=StopReason.FINAL_ANSWER,
        reward=0.5,
    )


def test_stock_is_taken_of_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Done, lost (attempted again, after all others), missing; a torn line is said."""
    path = tmp_path / "t.jsonl"
    wanted = settings(path)
    with Record(path, recorded_settings(wanted)) as record:
        for row in (trajectory("000", 0), lost(trajectory("000", 1)), trajectory("001", 2), trajectory("002", 0)):
            record.append(row)
    with path.open("ab") as file:
        file.write(b'{"trajectory_id": "evalu')
    with Record(path, recorded_settings(wanted)) as record:
        tally, missing = take_stock(record, Workshop().tasks("heldout", 4, 0), wanted)
    assert (tally.trajectories, tally.lost, tally.reward) == (3, 0, 1.5)
    assert [(task.task_id, siblings) for task, siblings in missing] == [
        *(("001", [0, 1]), ("002", [1, 2]), ("003", [0, 1, 2])),
        ("000", [1, 2]),
    ]
    assert [row.trajectory_id for row in read_trajectories(path)] == [
        *("evaluation/000/0", "evaluation/001/2", "evaluation/002/0")
    ]
    said = capsys.readouterr().out
    assert "the last line was cut off in the middle (24 bytes); dropped" in said
    assert "3 of 12 trajectories are there, 1 that were lost to infrastructure are attempted again" in said


def finished(path: Path) -> RolloutSettings:
    """A file with all its trajectories."""
    wanted = settings(path)
    with Record(path, recorded_settings(wanted)) as record:
        for task_id, sibling in sorted(ALL):
            record.append(trajectory(task_id, sibling))
    return wanted


def test_when_all_is_there_no_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    finished(path)
    line = asyncio.run(run_rollouts(settings(path, "--rollout.engine.max_concurrent", "9")))
    assert line.startswith(f"30 trajectories in {path}; reward 0.50")


@pytest.mark.slow
def test_a_full_disk_is_said_of_its_file_and_how_far_it_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    wanted = finished(path)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-1]))
    with full_disk(path.stat().st_size + 50), pytest.raises(OSError, match="File too large") as caught:
        asyncio.run(run_rollouts(wanted))
    assert caught.value.filename == str(path)
    assert f"29 of 30 trajectories are in {path}; start the same command again to continue" in capsys.readouterr().err
    assert path.read_bytes() == b"".join(whole[:-1])


@pytest.mark.parametrize(
    ("more", "difference"),
    [
        (("--seed", "7"), "seed was 0, now 7"),
        (("--attempts", "4"), "attempts was 3, now 4"),
        (("--rollout.sampling.temperature", "0.5"), r"rollout\.sampling\.temperature was 1\.0, now 0\.5"),
    ],
)
def test_another_configuration_is_refused_with_the_difference(
    tmp_path: Path, more: tuple[str, ...], difference: str
) -> None:
    path = tmp_path / "t.jsonl"
    finished(path)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=rf"t\.jsonl holds trajectories of another configuration \({difference}\)"):
        asyncio.run(run_rollouts(settings(path, *more)))
    assert path.read_bytes() == content


def test_files_put_one_behind_the_other_are_each_asked_for_their_settings(tmp_path: Path) -> None:
    path, other = tmp_path / "t.jsonl", tmp_path / "other.jsonl"
    with Record(other, recorded_settings(settings(other, "--seed", "7"))) as record:
        record.append(trajectory("heldout-0-1", 0))
    with Record(path, recorded_settings(settings(path))) as record:
        record.append(trajectory("heldout-0-0", 0))
    content = path.read_bytes() + other.read_bytes()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.jsonl holds trajectories of another configuration \(seed was 7, now 0\)"):
        asyncio.run(run_rollouts(settings(path)))
    assert path.read_bytes() == content


def test_an_attempt_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    wanted = finished(path)
    content = path.read_bytes() * 2
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.jsonl holds attempt 0 at task heldout-0-0 twice: files with the same"):
        asyncio.run(run_rollouts(wanted))
    assert path.read_bytes() == content


def test_a_file_of_run_eval_is_refused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "e.trajectories.jsonl"
    values = resolved(load_settings(EvalSettings, [*ARGUMENTS, "--output", str(tmp_path / "e.json")]))
    with Record(path, values) as record:
        record.append(trajectory("heldout-0-0", 0))
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"was written by another command \(run_eval .*choose another output"):
        asyncio.run(run_rollouts(settings(path)))
    assert path.read_bytes() == content


def test_other_weights_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    """A model that was trained further is another policy."""
    path, model = tmp_path / "t.jsonl", tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"old weights")
    wanted = settings(path, "--model", str(model))
    with Record(path, recorded_settings(wanted)) as record:
        record.append(trajectory("heldout-0-0", 0))
    (model / "model.safetensors").write_bytes(b"new weights")
    with pytest.raises(ValueError, match=r"another configuration \(weights was '\w+', now '\w+'\)"):
        asyncio.run(run_rollouts(wanted))


def test_bad_input_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = error_line(run("scripts.run_rollouts", *ARGUMENTS, "--output", str(path), "--model", "models/none"))
    assert "model models/none: no such folder" in line
    assert not path.exists()
    path.write_text("notes")
    line = error_line(run("scripts.run_rollouts", *ARGUMENTS, "--output", str(path)))
    assert "does not say with which settings it was written" in line


def test_help_has_an_example() -> None:
    done = run("scripts.run_rollouts", "--help")
    assert done.returncode == 0
    assert "python -m scripts.run_rollouts --config configs/eval_quickstart.toml --output rollouts.jsonl" in done.stdout


def test_a_file_that_says_nothing_of_its_settings_cannot_be_replayed(tmp_path: Path) -> None:
    write_trajectories(tmp_path / "t.jsonl", [trajectory("a", 0)])
    line = error_line(run("scripts.replay_rollouts", str(tmp_path / "t.jsonl")))
    assert "neither its header nor a run folder says what its trajectories were sampled with" in line


ATTEMPTS = 6
"""So many that none is through before it is stopped, however long this process was not looking."""


class Worker:
    """A started command, ten tasks at `ATTEMPTS`; it is killed at the end of its test, whatever comes."""

    def __init__(self, output: Path, command: str = "run_rollouts") -> None:
        started = [sys.executable, "-m", f"scripts.{command}", *ARGUMENTS, "--attempts", str(ATTEMPTS)]
        self.output = output
        self.process = subprocess.Popen(
            [*started, "--output", str(output)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for_lines(self, count: int, path: Path | None = None) -> None:
        while self.process.poll() is None and _lines(path or self.output) < count:
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.process.kill()
        worker.process.wait()


def check_exactly_once(path: Path) -> None:
    rows = list(read_trajectories(path))
    wanted = {(f"heldout-0-{task}", sibling) for task in range(10) for sibling in range(ATTEMPTS)}
    assert Counter((row.task_id, row.sibling_index) for row in rows) == dict.fromkeys(wanted, 1)
    assert all(row.reward is not None for row in rows)
    ids = [row.trajectory_id for row in rows]
    assert len(set(ids)) == len(ids)
    assert read_settings(path) is not None


@pytest.mark.slow
def test_killed_anywhere_each_trajectory_is_there_exactly_once(tmp_path: Path, workers: list[Worker]) -> None:
    """SIGKILL after some lines, once with a line torn in the middle, then SIGINT; the last start does the rest. What is
    in the file can be replayed."""
    path = tmp_path / "t.jsonl"
    chosen = random.Random(0)
    for lines in (4, 12):
        workers.append(Worker(path))
        workers[-1].wait_for_lines(lines)
        time.sleep(chosen.random() / 10)
        workers[-1].process.kill()
        assert workers[-1].end()[0] == -signal.SIGKILL
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    kept = _lines(path)

    workers.append(Worker(path))
    workers[-1].wait_for_lines(kept + 6)
    workers[-1].process.send_signal(signal.SIGINT)
    code, out, err = workers[-1].end()
    assert code == 130, err[-2000:]
    assert "the last line was cut off in the middle" in out
    assert f"of {10 * ATTEMPTS} trajectories are in {path}" in err
    assert "start the same command again to continue" in err
    assert "Traceback" not in err
    assert _lines(path) >= kept + 6
    assert path.read_bytes().endswith(b"\n")

    workers.append(Worker(path))
    code, out, err = workers[-1].end()
    assert code == 0, err[-2000:]
    assert f"\nrollouts: {10 * ATTEMPTS} trajectories in {path}; reward " in out
    assert "\n  ended by: " in out
    check_exactly_once(path)
    count, differences, skipped = asyncio.run(replay_file(path, None))
    assert (count, differences, skipped) == (10 * ATTEMPTS, [], [])


@pytest.mark.slow
def test_two_runs_of_one_seed_sample_the_same(tmp_path: Path, workers: list[Worker]) -> None:
    """However they were interrupted: each completion has a seed of its own."""
    for name in ("a", "b"):
        workers.append(Worker(tmp_path / name))
        if name == "b":
            workers[-1].wait_for_lines(10)
            os.kill(workers[-1].process.pid, signal.SIGTERM)
            assert workers[-1].end()[0] == 130
            workers.append(Worker(tmp_path / name))
        assert workers[-1].end()[0] == 0
    a, b = (
        {row.trajectory_id: [stream.token_ids for stream in row.streams] for row in read_trajectories(tmp_path / name)}
        for name in ("a", "b")
    )
    assert a == b
