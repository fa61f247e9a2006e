"""The ledger: what the policy really sampled, written down before anybody else sees it.

One JSON line a completion, appended and flushed, in `ledger/completions.jsonl` of the run folder. The gate
compares the batch that is about to be trained with the ledger, not with the mask that the batch was made from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from pydantic import TypeAdapter

from data.jsonl import append_line, read_lines
from data.types import Completion

_COMPLETION = TypeAdapter(Completion)


class Ledger:
    """Completions by id; appended to a file when `path` is given.

    The file holds all completions; the memory those that nobody has taken yet. A run that continues samples some groups
    again: `keep` says whether a group's completions stay in the file, and those of the groups in `remember` are in
    memory from the start, for they are still to be trained.
    """

    def __init__(
        self, path: Path | None = None, *, keep: Callable[[str], bool] | None = None, remember: Collection[str] = ()
    ) -> None:
        self._entries: dict[str, Completion] = {}
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_whole_lines(path, keep)
            if remember and path.exists():
                for completion in read_lines(path, _COMPLETION):
                    if group_of(completion.completion_id) in remember:
                        self._entries[completion.completion_id] = completion
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

    def take(self, group_ids: Collection[str]) -> Ledger:
        """The completions of some groups, which leave this ledger's memory; the file keeps them."""
        taken = Ledger()
        taken._entries = {name: one for name, one in self._entries.items() if group_of(name) in group_ids}
        for name in taken._entries:
            del self._entries[name]
        return taken

    def forget(self) -> None:
        """Drop all from memory; the file keeps it."""
        self._entries.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def group_of(name: str) -> str:
    """The group of a completion, by its id, `{group}/{sibling}/{turn}`.

    >>> group_of("group-7/train-0-3/1/0")
    'group-7/train-0-3'
    """
    return name.rsplit("/", 2)[0]


def read_ledger(path: Path, *, groups: Collection[str] | None = None) -> Ledger:
    """An in-memory ledger with the completions of a file; of `groups` only, where they are given: the file holds all
    steps of a run, and a dump only its own."""
    ledger = Ledger()
    for completion in read_lines(path, _COMPLETION):
        if groups is None or group_of(completion.completion_id) in groups:
            ledger.record(completion)
    return ledger


def _keep_whole_lines(path: Path, keep: Callable[[str], bool] | None) -> None:
    """Drop the line that a killed writer left unfinished, and the completions of groups that will be sampled again."""
    if not path.exists():
        return
    temporary = path.with_suffix(".tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        for line in old:
            if line.endswith(b"\n") and (keep is None or keep(group_of(json.loads(line)["completion_id"]))):
                new.write(line)
    temporary.replace(path)
