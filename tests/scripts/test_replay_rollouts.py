"""The command that runs a file of trajectories again: with which settings, and what it says when it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollouts.record import Record
from scripts.replay_rollouts import replay_file
from tests.rollouts.test_replay import record


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Two files, one behind the other: an answer, and one that was ended by its third turn."""
    for name, story in (("a", "an answer"), ("b", "too many turns")):
        trajectory, limits = record(story, tmp_path)
        settings = {"model": "models/embedded", "rollout": {"limits": limits, "engine": {"max_context_tokens": 8000}}}
        with Record(tmp_path / name, settings) as file:
            file.append(trajectory)
    path = tmp_path / "both.jsonl"
    path.write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    return path


def test_each_trajectory_runs_with_the_settings_before_it(both: Path) -> None:
    assert asyncio.run(replay_file(both, None)) == (2, [], [])
