"""The ledger: what the policy really sampled, written down before anybody else sees it.

One JSON line a completion, appended and flushed, in `ledger/completions.jsonl` of the run folder. The gate
compares the batch that is about to be trained with the ledger, not with the mask that the batch was made from.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from data.types import Completion


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
            self._file = path.open("a", encoding="utf-8")

    def record(self, completion: Completion) -> None:
        """Add a completion.

        Raises:
            ValueError: its id is in the ledger already; ids are never used twice.
        """
        if completion.completion_id in self._entries:
            raise ValueError(f"ledger: completion {completion.completion_id} is recorded already")
        if self._file is not None:
            self._file.write(json.dumps(asdict(completion)) + "\n")
            self._file.flush()
        self._entries[completion.completion_id] = completion

    def get(self, completion_id: str) -> Completion | None:
        return self._entries.get(completion_id)

    def forget(self) -> None:
        """Drop from memory what has been trained; the file keeps it."""
        self._entries.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_ledger(path: Path) -> Ledger:
    """An in-memory ledger with the completions of a file; of a repeated id (a resumed step) the last counts."""
    ledger = Ledger()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name in ("token_ids", "logprobs", "policy_version"):
            row[name] = tuple(row[name])
        completion = Completion(**row)
        ledger._entries[completion.completion_id] = completion
    return ledger


def drop_torn_line(path: Path) -> None:
    """Cut an unfinished last line, which a killed process leaves, off a JSONL file."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        keep = content.rfind(b"\n") + 1
        with path.open("r+b") as file:
            file.truncate(keep)
