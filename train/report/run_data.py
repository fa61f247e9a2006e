"""What does a run folder hold? Everything a report needs, read from disk; whatever is missing is said, not raised.

A folder is a whole quickstart (`data/ sft/ grpo/ eval/`), or a single GRPO or SFT run, finished, going on, or killed.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from data.jsonl import read_lines
from train.report.evaluations import EvaluationFile, read_evaluation

Row = Mapping[str, Any]
_ROW = TypeAdapter(dict[str, Any])
# The order in which the stages follow each other; other evaluations come after them by name.
_STAGE_ORDER = ("base", "sft", "grpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """A run as it is on disk.

    evaluations: in the order of the stages. sft, grpo: metrics, a row a step. grpo_folder: where its samples are.
    max_steps: how many GRPO steps are planned, where the configuration says so.
    configs: file name → text. notes: what is missing or could not be read, a sentence each.
    """

    name: str
    folder: Path
    evaluations: tuple[EvaluationFile, ...]
    sft: tuple[Row, ...]
    grpo: tuple[Row, ...]
    grpo_folder: Path | None
    demonstrations: Path | None
    max_steps: int | None
    configs: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Reader:
    """Reads what is there, and collects a sentence about what is not."""

    notes: list[str] = field(default_factory=list)

    def metrics(self, folder: Path | None) -> tuple[Row, ...]:
        if folder is None or not (folder / "metrics.jsonl").is_file():
            return ()
        try:
            rows = [row for row in read_lines(folder / "metrics.jsonl", _ROW) if isinstance(row.get("step"), int)]
        except ValueError as error:
            self.notes.append(f"The metrics could not be read: {error}.")
            return ()
        # Of a step that is there twice (a run that was killed and went on), the later row is the one that counts.
        return tuple(row for _, row in sorted({row["step"]: row for row in rows}.items()))

    def evaluations(self, folders: Sequence[Path]) -> tuple[EvaluationFile, ...]:
        found: list[EvaluationFile] = []
        paths = sorted((path for folder in folders for path in folder.glob("*.json")), key=_stage)
        for path in paths:
            try:
                found.append(read_evaluation(path))
            except (ValueError, OSError) as error:
                self.notes.append(f"An evaluation was left out: {error}.")
        return tuple(found)


def load_run(folder: Path) -> RunData:
    """Read a run folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: nothing in it is of a run.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such run folder")
    reader = _Reader()
    grpo_folder, sft_folder = _training_folders(folder)
    evaluations = reader.evaluations([folder / "eval"])
    sft, grpo = reader.metrics(sft_folder), reader.metrics(grpo_folder)
    if not (evaluations or sft or grpo):
        raise ValueError(f"{folder}: neither metrics.jsonl nor eval/*.json is there; is it a run folder?")
    configs = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace")
        for one in dict.fromkeys((folder, sft_folder, grpo_folder))
        if one is not None
        for path in (one / "config.toml", one / "config.json")
        if path.is_file()
    }
    demonstrations = sorted((folder / "data").glob("*.jsonl"))
    planned = grpo_setting(grpo_folder, "max_steps") if grpo_folder is not None else None
    max_steps = planned if isinstance(planned, int) else None
    notes = [*reader.notes, *_missing(evaluations, sft, grpo, grpo_folder, max_steps)]
    return RunData(
        name=folder.resolve().name,
        folder=folder,
        evaluations=evaluations,
        sft=sft,
        grpo=grpo,
        grpo_folder=grpo_folder,
        demonstrations=demonstrations[0] if demonstrations else None,
        max_steps=max_steps,
        configs=configs,
        notes=tuple(notes),
    )


def load_runs(folders: Sequence[Path]) -> list[RunData]:
    """Several runs; where two folders have one name, all are called by their path."""
    runs = [load_run(folder) for folder in folders]
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; steps without a finite value are left out."""
    steps: list[int] = []
    values: list[float] = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            steps.append(row["step"])
            values.append(float(value))
    return steps, values


def keys_under(rows: Sequence[Row], prefix: str) -> list[str]:
    """The metrics `prefix…` that are not zero throughout, the largest in sum first."""
    sums: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(prefix) and isinstance(value, int | float) and math.isfinite(value):
                sums[key] = sums.get(key, 0.0) + value
    return sorted(filter(sums.get, sums), key=lambda key: -sums[key])


def grpo_setting(folder: Path, key: str) -> Any:
    """A key of `[grpo]` in the configuration of a GRPO run; None where it cannot be had."""
    try:
        if (folder / "config.toml").is_file():
            config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        else:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config["grpo"][key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _training_folders(folder: Path) -> tuple[Path | None, Path | None]:
    """The folders of the GRPO run and of the SFT run."""
    grpo = folder / "grpo" if (folder / "grpo").is_dir() else None
    sft = folder / "sft" if (folder / "sft").is_dir() else None
    if (folder / "metrics.jsonl").is_file():
        # Only a GRPO run samples.
        if any((folder / name).is_dir() for name in ("trajectories", "samples", "ledger")):
            grpo = grpo or folder
        else:
            sft = sft or folder
    return grpo, sft


def _missing(
    evaluations: Sequence[EvaluationFile],
    sft: Sequence[Row],
    grpo: Sequence[Row],
    grpo_folder: Path | None,
    max_steps: int | None,
) -> list[str]:
    notes: list[str] = []
    if not evaluations:
        notes.append("There is no evaluation yet, so this page cannot say how well the model does on held-out tasks.")
    elif len(evaluations) == 1:
        notes.append("There is one evaluation only, so there is nothing to compare it with.")
    if not sft:
        notes.append("There is no warm start in this folder.")
    if not grpo:
        where = "no GRPO run in this folder" if grpo_folder is None else "no finished GRPO step yet"
        notes.append(f"There is {where}.")
    elif max_steps is not None and grpo[-1]["step"] < max_steps:
        notes.append(
            f"GRPO has finished {grpo[-1]['step']} of {max_steps} steps: it is still going on, or it was stopped. "
            "The same command continues it."
        )
    return notes


def _stage(path: Path) -> tuple[int, str]:
    order = _STAGE_ORDER.index(path.stem) if path.stem in _STAGE_ORDER else len(_STAGE_ORDER)
    return order, path.stem
