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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "the file is empty"),
        ('{"messages": []}\n', "holds demonstrations, not trajectories; replay a file of run_rollouts"),
        ('{"format": "agentgrad.trajectories", "version": 2, "settings": {}}\n', "there are no trajectories in it"),
        ('{"format": "agentgrad.traj', "there is no whole row in it: its only line is cut off"),
    ],
)
def test_a_file_without_trajectories_says_what_it_is(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"t.jsonl:? {says}"):
        asyncio.run(replay_file(path, None))


def test_a_last_line_that_is_cut_off_is_said(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = both.read_bytes()
    both.write_bytes(content[:-30])
    torn = len(content[:-30].rpartition(b"\n")[2])
    assert asyncio.run(replay_file(both, None)) == (1, [], [])
    assert f"{both}: the last line is cut off ({torn} bytes of it are there); it is left out" in capsys.readouterr().err
