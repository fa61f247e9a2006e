"""The trajectory file: JSONL, one trajectory a line, written in one move for each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter

from data.jsonl import read_lines, write_lines
from rollouts.types import Trajectory

TRAJECTORY = TypeAdapter(Trajectory)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a file in one move: it is there whole or not at all."""
    write_lines(path, TRAJECTORY, trajectories)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file; errors as `data.jsonl.read_lines`."""
    return read_lines(path, TRAJECTORY)
