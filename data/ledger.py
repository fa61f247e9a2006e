"""The ledger: what the policy really sampled, written down before anybody else sees it.

One JSON line a completion, appended and flushed, in `ledger/completions.jsonl` of the run folder. The gate
compares the batch that is about to be trained with the ledger, not with the mask that the batch was made from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter

from data.jsonl import append_line, read_lines
from data.types import Completion, TrainingSample

_COMPLETION = TypeAdapter(Completion)


class Ledger:
    """Completions by id; appended to a file when `path` is given.

    The memory holds the completions since the last `forget`; the file holds them all. A run that continues after step
    `after_step` samples what followed again: later completions of a killed run are removed from the file.
    """

    def __init__(self, path: Path | None = None, *, after_step: int | None = None) -> None:
        self._entries: dict[str, Completion] = {}
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_whole_lines(path, after_step)
            self._file = path.open("ab")

    def record(self, completion: Completion) -> None:
        """Add a completion.

        Raises:
            ValueError: its id is in the ledger already; ids are never used twice.
        """
        if completion.completion_id in self._entries:
            raise ValueError(f"ledger: completion {completion.completion_id} is recorded already")
        if self._file is not None:
            append_line(self._file, _COMPLETION, completion)
        self._entries[completion.completion_id] = completion

    def get(self, completion_id: str) -> Completion | None:
        return self._entries.get(completion_id)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self._entries.values())

    def forget(self) -> None:
        """Drop from memory what has been trained; the file keeps it."""
        self._entries.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_ledger(path: Path, *, samples: Iterable[TrainingSample] | None = None) -> Ledger:
    """An in-memory ledger with the completions of a file.

    Args:
        samples: keep only the completions of their steps (the first part of a trajectory's id, `step-7`); the file
            holds all steps of a run, and a dump only its own.
    """
    steps = None if samples is None else {sample.trajectory_id.split("/")[0] for sample in samples}
    ledger = Ledger()
    for completion in read_lines(path, _COMPLETION):
        if steps is None or completion.completion_id.split("/")[0] in steps:
            ledger.record(completion)
    return ledger


def _keep_whole_lines(path: Path, last_step: int | None) -> None:
    """Drop the line that a killed writer left unfinished, and completions (`step-7/train-0-3/1/0`) of later steps."""
    if not path.exists():
        return
    temporary = path.with_suffix(".tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        for line in old:
            if line.endswith(b"\n") and (last_step is None or _step(line) <= last_step):
                new.write(line)
    temporary.replace(path)


def _step(line: bytes) -> int:
    return int(json.loads(line)["completion_id"].partition("/")[0].removeprefix("step-"))
