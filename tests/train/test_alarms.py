"""Each alarm says once, when it begins, what is wrong and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from train.alarms import alarms

QUIET: dict[str, Any] = {
    "entropy": 1.0,
    "logprob_gap/mean": 0.001,
    "correction/tokens": 0.0,
    "rewards/excluded": 0,
    "groups/dead": 0.3,
    "reward/mean": 0.4,
    "trajectories": 16,
    "trajectories/failed": 0,
    "tokens/trained": 1000,
    "tokens/excluded/truncated": 100,
}


def heard(rows: list[dict[str, Any]]) -> dict[int, list[str]]:
    """The lines by step, heard as a run hears them."""
    found = {step: alarms(rows[:step]) for step in range(1, len(rows) + 1)}
    return {step: lines for step, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("change", "begins", "line"),
    [
        ({"entropy": 0.1}, 15, "entropy fell from 1.000 to 0.100 nats a token"),
        ({"logprob_gap/mean": 0.2}, 11, "engine and trainer differ by 0.200 nats a token"),
        ({"correction/tokens": 0.25}, 11, "the correction between engine and trainer changes 25 % of the tokens"),
        ({"rewards/excluded": 3}, 11, "3 trajectories have a reward of None or NaN and are left out"),
        ({"groups/dead": 1.0}, 14, "86 % of the groups of the last 5 steps were dead; the tasks are too hard"),
        ({"groups/dead": 1.0, "reward/mean": 0.9}, 14, "86 % of the groups of the last 5 steps were dead"),
        ({"trajectories/failed": 8}, 13, "24 of 80 trajectories of the last 5 steps were lost"),
        ({"tokens/excluded/truncated": 3000}, 12, "more tokens were left out for a limit"),
    ],
)
def test_an_alarm_is_heard_once_when_it_begins(change: dict[str, float], begins: int, line: str) -> None:
    rows = [QUIET] * 10 + [QUIET | change] * 10
    lines = heard(rows)
    assert list(lines) == [begins]
    assert len(lines[begins]) == 1
    assert lines[begins][0].startswith(line)
    assert ";" in lines[begins][0], "it says what to do"


def test_a_quiet_run_has_none() -> None:
    assert heard([QUIET] * 100) == {}


def test_it_is_heard_again_after_it_was_over() -> None:
    loud = QUIET | {"logprob_gap/mean": 0.2}
    assert list(heard([QUIET, loud, loud, QUIET, loud])) == [2, 5]


def test_steps_without_an_update_and_numbers_that_were_not_finite_are_no_alarm() -> None:
    nothing = {"step": 1, "groups/dead": 0.2, "trajectories": 4, "trajectories/failed": 0}
    assert heard([nothing] * 20 + [nothing | {"entropy": None, "logprob_gap/mean": None}] * 20) == {}
