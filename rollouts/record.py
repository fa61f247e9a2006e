"""The trajectory file: JSONL, one trajectory a line, written in one move for each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter

from data.jsonl import append_line, read_lines
from rollouts.types import Trajectory

TRAJECTORY = TypeAdapter(Trajectory)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a file; it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for trajectory in trajectories:
            append_line(file, TRAJECTORY, trajectory)
    temporary.replace(path)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file; errors as `data.jsonl.read_lines`."""
    return read_lines(path, TRAJECTORY)
