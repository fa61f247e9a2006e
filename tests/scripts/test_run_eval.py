"""Evaluation as a command: an earlier result is there until a new one takes its place."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts.record import read_trajectories
from tests.scripts.test_run_rollouts import ATTEMPTS, Worker
from train.report.evaluations import read_evaluation


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.mark.slow
def test_an_interrupted_evaluation_leaves_the_earlier_one_as_it_was(tmp_path: Path, workers: list[Worker]) -> None:
    figures, trajectories = tmp_path / "e.json", tmp_path / "e.trajectories.jsonl"
    figures.write_text("the figures of yesterday")
    trajectories.write_text("the trajectories of yesterday")
    unfinished = tmp_path / "e.unfinished.jsonl"

    workers.append(Worker(figures, "run_eval"))
    workers[-1].wait_for_lines(5, unfinished)
    workers[-1].process.send_signal(signal.SIGINT)
    code, out, err = workers[-1].end()
    assert (code, out) == (130, ""), err[-2000:]
    assert figures.read_text() == "the figures of yesterday"
    assert trajectories.read_text() == "the trajectories of yesterday"
    sampled = len(list(read_trajectories(unfinished)))
    assert err.endswith(
        f"{sampled} of {10 * ATTEMPTS} trajectories are in {unfinished}\n"
        "interrupted; started again, the same command begins from the start\n"
    )

    workers.append(Worker(figures, "run_eval"))
    code, out, err = workers[-1].end()
    assert code == 0, err[-2000:]
    assert read_evaluation(figures).evaluation.tasks == 10
    rows = list(read_trajectories(trajectories))
    assert len({(row.task_id, row.sibling_index) for row in rows}) == len(rows) == 10 * ATTEMPTS
    assert sorted(one.name for one in tmp_path.iterdir()) == ["e.json", "e.trajectories.jsonl"]
