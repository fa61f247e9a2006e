"""Evaluation: the estimators against brute force, and attempts that our machinery lost are not graded."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.types import TokenStream
from envs.types import Task
from rollouts.config import ScheduleConfig
from rollouts.engine_scripted import ScriptedEngine
from rollouts.evaluate import pass_at_k, pass_hat_k, summarise_groups
from rollouts.scheduler import sample_groups
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from tests.data.test_types import no_clock
from tests.rollouts.desk import Desk, in_sandboxes, make_runner, say


@st.composite
def attempts(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@no_clock
@given(case=attempts())
def test_the_estimators_are_the_mean_over_all_choices_of_k(case: tuple[int, int, int]) -> None:
    n, c, k = case
    chosen = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(some) for some in chosen) / len(chosen))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(some) for some in chosen) / len(chosen))


@no_clock
@given(case=attempts())
def test_with_one_attempt_both_are_the_success(case: tuple[int, int, int]) -> None:
    n, c, _ = case
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert pass_hat_k(n, c, 1) == pytest.approx(c / n)


def make_group(task_id: str, rewards: list[float | None], error: str | None = None) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(
            trajectory_id=f"{task_id}/{index}",
            task_id=task_id,
            group_id=task_id,
            sibling_index=index,
            streams=(TokenStream(),),
            turns=(),
            stop_reason=StopReason.FINAL_ANSWER if reward is not None else StopReason.SANDBOX_ERROR,
            reward=reward,
            error=error if reward is None else None,
        )
        for index, reward in enumerate(rewards)
    )
    return TrajectoryGroup(group_id=task_id, task=Task(task_id=task_id, prompt="?"), trajectories=trajectories)


def test_figures_by_hand() -> None:
    groups = [make_group("a", [1.0, 0.0, 1.0, 1.0]), make_group("b", [0.0, 0.0, 0.0, 1.0])]
    result = summarise_groups(groups, attempts=4)
    assert result.counts == {"a": (3, 4), "b": (1, 4)}
    assert (result.tasks, result.attempts) == (2, 4)
    assert result.success == pytest.approx(0.5)
    # The shares are 3/4 and 1/4: standard deviation sqrt(1/8), divided by sqrt(2).
    assert result.success_stderr == pytest.approx(math.sqrt(1 / 8) / math.sqrt(2))
    assert result.pass_at_k == pytest.approx({1: 0.5, 2: (1 + 1 / 2) / 2, 4: 1.0})
    assert result.pass_hat_k == pytest.approx({1: 0.5, 2: (1 / 2 + 0) / 2, 4: 0.0})


def test_failed_attempts_are_not_graded() -> None:
    lost = summarise_groups([make_group("a", [1.0, None, 0.0, None]), make_group("b", [1.0, 1.0])], attempts=4)
    kept = summarise_groups([make_group("a", [1.0, 0.0]), make_group("b", [1.0, 1.0])], attempts=4)
    assert (lost.success, lost.pass_at_k, lost.pass_hat_k) == (kept.success, kept.pass_at_k, kept.pass_hat_k)
    assert lost.counts == {"a": (1, 2), "b": (2, 2)}
    assert lost.summary["trajectories/failed"] == 2


def test_a_task_without_a_graded_attempt_is_in_no_mean() -> None:
    result = summarise_groups([make_group("a", [1.0, 1.0]), make_group("b", [None, None])], attempts=2)
    assert (result.success, result.tasks) == (1.0, 1)
    assert result.counts["b"] == (0, 0)


def test_a_lost_attempt_takes_its_task_out_of_the_larger_k_only() -> None:
    half = [1.0, 0.0, 0.0, 0.0] + [None] * 4
    whole = [make_group(str(index), [1.0] * 8) for index in range(9)]
    result = summarise_groups([*whole, make_group("half", half)], attempts=8)
    assert list(result.pass_at_k) == list(result.pass_hat_k) == [1, 2, 4, 8]
    assert result.pass_at_k[4] == 1.0
    assert result.pass_hat_k[4] == pytest.approx(0.9)
    assert result.pass_hat_k[8] == 1.0, "of the nine tasks that have eight graded attempts"
    assert result.success == pytest.approx(0.925)


def test_a_k_that_many_tasks_lack_is_left_out() -> None:
    """It would be a figure of a few tasks that looks like one of all."""
    half = [1.0, 0.0, 0.0, 0.0] + [None] * 4
    result = summarise_groups([make_group("a", [1.0] * 8), make_group("b", half)], attempts=8)
    assert list(result.pass_at_k) == list(result.pass_hat_k) == [1, 2, 4]


def test_partial_rewards_are_no_success() -> None:
    assert summarise_groups([make_group("a", [0.99, 1.0, 1.5, -1.0])], attempts=4).success == 0.5


def test_a_reward_short_of_1_by_rounding_is_a_success() -> None:
    assert summarise_groups([make_group("a", [0.7 + 0.2 + 0.1])], attempts=1).success == 1.0


def test_nothing_graded_is_an_error_with_its_cause() -> None:
    with pytest.raises(ValueError, match=r"^no attempt could be graded: OSError: no space left$"):
        summarise_groups([make_group("a", [None], error="Traceback …\nOSError: no space left\n")], attempts=1)


def test_every_task_is_attempted_so_often() -> None:
    """The scripted model answers right three times of four; one call fails."""
    script = [say("ok"), say("ok"), say("ko"), say("ok")] * 2
    heard: list[str] = []
    engine = ScriptedEngine(script, fail_calls=[3])
    groups = in_sandboxes(
        lambda sandboxes: sample_groups(
            make_runner(engine, sandboxes),
            Desk().tasks("heldout", 2, 0),
            num_generations=4,
            prefix="eval",
            schedule=ScheduleConfig(max_trajectories=1, infrastructure_retries=0),
            on_done=lambda trajectory: heard.append(trajectory.trajectory_id),
        )
    )
    result = summarise_groups(groups, attempts=4)
    assert result.counts == {"heldout-0-0": (2, 3), "heldout-0-1": (3, 4)}
    assert result.success == pytest.approx((2 / 3 + 3 / 4) / 2)
    assert heard == [trajectory.trajectory_id for group in groups for trajectory in group.trajectories]
    assert heard[0] == "eval/heldout-0-0/0"
    assert result.summary["stop/engine_error"] == pytest.approx(1 / 8)
