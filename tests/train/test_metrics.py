"""The metrics file: every line is JSON that any reader takes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from train.metrics import MetricsLog, Publisher, read_metrics


def open_log(folder: Path, start_after: int, run: Publisher | None = None) -> MetricsLog:
    return MetricsLog(folder, start_after=start_after, run=run)


def strict_rows(path: Path) -> list[Any]:
    """The rows, read by a reader that refuses NaN and Infinity, which are not JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "entropy": 0.5})
    log.close()
    rows = [{"step": 1, "loss": None, "grad_norm": None, "entropy": 0.5}]
    assert strict_rows(tmp_path / "metrics.jsonl") == rows
    assert read_metrics(tmp_path / "metrics.jsonl") == rows


def test_rows_that_are_kept_are_null_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n', encoding="utf-8")
    open_log(tmp_path, 1).close()
    assert strict_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None}]


class ListPublisher:
    """Remembers which steps it was handed."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        self.steps.append(step)

    def finish(self) -> None: ...


def test_each_step_of_a_checkpoint_is_published_once_however_often_the_run_is_killed(tmp_path: Path) -> None:
    run = ListPublisher()
    log = open_log(tmp_path, 0, run)
    log.write({"step": 1})
    log.publish()
    log.write({"step": 2})  # checkpointed, and killed before it was published
    log.close()
    log = open_log(tmp_path, 2, run)
    log.write({"step": 3})
    log.publish()
    log.write({"step": 4})  # in no checkpoint
    log.close()
    log = open_log(tmp_path, 3, run)
    log.publish()
    log.close()
    assert run.steps == [1, 2, 3]
