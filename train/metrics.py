"""Where a run's numbers go: `metrics.jsonl`, one row a step, and Weights & Biases.

The file is live: a row is there as soon as its step is done. Weights & Biases gets a step once it is safe in a
checkpoint, since what it has seen cannot be taken back when a killed run continues from an earlier step.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import wandb

from data.jsonl import replace_text
from train.config import WandbConfig


class Publisher(Protocol):
    """What steps are handed to once they are safe: a run of Weights & Biases."""

    def log(self, data: dict[str, Any], step: int) -> None: ...

    def finish(self) -> None: ...


class MetricsLog:
    """Rows by step. `start_after` is the step that the run continues from; later rows of a killed run are removed.
    `run` is what `start_wandb` gave."""

    def __init__(self, folder: Path, *, start_after: int, run: Publisher | None) -> None:
        self._path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self._path) if row["step"] <= start_after] if self._path.exists() else []
        self.rows: list[Mapping[str, Any]] = [*kept]
        replace_text(self._path, "".join(_line(row) for row in kept))
        self._file = self._path.open("a", encoding="utf-8")
        # What a killed run had in a checkpoint and not yet published.
        self._published = folder / "published_step"
        last = int(self._published.read_text()) if self._published.exists() else 0
        self._pending: list[Mapping[str, Any]] = [row for row in kept if row["step"] > last]
        self._run = run

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row of one step; it must have the key `step`. A number that is not finite becomes null."""
        self._file.write(_line(row))
        self._file.flush()
        self.rows.append(row)
        self._pending.append(row)

    def publish(self) -> None:
        """The steps so far are in a checkpoint: hand them to Weights & Biases."""
        if self._run is not None:
            for row in self._pending:
                self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])
            if self._pending:
                replace_text(self._published, str(self._pending[-1]["step"]))
        self._pending.clear()

    def close(self) -> None:
        self._file.close()
        if self._run is not None:
            self._run.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a torn last line is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def _line(row: Mapping[str, Any]) -> str:
    """A row as JSON, which has no NaN and no infinity."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def start_wandb(folder: Path, settings: WandbConfig, config: Mapping[str, Any]) -> Publisher | None:
    """The run of a folder in Weights & Biases, the same one whenever the folder's run continues.

    Raises:
        ValueError: it did not start; one line says what to do.
    """
    mode = settings.mode
    if mode == "disabled":
        return None
    if mode == "auto":
        has_key = bool(os.environ.get("WANDB_API_KEY")) or "api.wandb.ai" in _netrc()
        mode = "online" if has_key else "offline"
    # One id for each run folder: a run that continues is the same run there.
    run_id = folder / "wandb" / "run_id"
    run_id.parent.mkdir(parents=True, exist_ok=True)
    if not run_id.exists():
        run_id.write_text(uuid.uuid4().hex[:8])
    try:
        return wandb.init(
            project=settings.project,
            name=folder.name,
            id=run_id.read_text(),
            resume="allow",
            mode=mode,
            dir=folder,
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise ValueError(f"Weights & Biases did not start ({error}); use --wandb.mode offline or disabled") from error


def _netrc() -> str:
    path = Path.home() / ".netrc"
    return path.read_text(encoding="utf-8") if path.exists() else ""
