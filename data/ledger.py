"""The ledger: what the policy really sampled, written down before anybody else sees it.

One JSON line a completion, appended and flushed, in `ledger/completions.jsonl` of the run folder. The gate
compares the batch that is about to be trained with the ledger, not with the mask that the batch was made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter

from data.jsonl import append_line, drop_torn_line, read_lines
from data.types import Completion, TrainingSample

_COMPLETION = TypeAdapter(Completion)


class Ledger:
    """Completions by id; appended to a file when `path` is given.

    The memory holds the completions since the last `forget`; the file holds them all.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._entries: dict[str, Completion] = {}
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            drop_torn_line(path)
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

    A step that was killed and sampled again repeats its ids: the last counts, and what the earlier attempt sampled
    after that turn of the trajectory is gone with it.

    Args:
        samples: keep only the completions of their steps (the first part of a trajectory's id, `step-7`); the file
            holds all steps of a run, and a dump only its own.
    """
    steps = None if samples is None else {sample.trajectory_id.split("/")[0] for sample in samples}
    ledger = Ledger()
    for completion in read_lines(path, _COMPLETION):
        if steps is not None and completion.completion_id.split("/")[0] not in steps:
            continue
        if completion.completion_id in ledger._entries:
            _drop_later_turns(ledger._entries, completion.completion_id)
        ledger._entries[completion.completion_id] = completion
    return ledger


def _drop_later_turns(entries: dict[str, Completion], completion_id: str) -> None:
    """Completions are numbered within their trajectory: `step-7/train-0-3/1/0`, `/1`, …"""
    trajectory_id, _, turn = completion_id.rpartition("/")
    if not turn.isdecimal():
        return
    later = int(turn) + 1
    while entries.pop(f"{trajectory_id}/{later}", None) is not None:
        later += 1
