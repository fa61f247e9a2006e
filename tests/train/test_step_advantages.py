"""The advantages of a step: groups by id, turns against turns, nothing of what has no reward, and what is shown."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.types import Excluded
from rollouts.samples import group_samples
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from tests.data.test_types import no_clock
from tests.train.graded import graded, grouped
from train.advantages import group_advantages, is_dead, step_advantages
from train.config import GrpoConfig
from train.step_samples import samples_and_metrics

PLAIN = GrpoConfig(scale_rewards="none")
CONFIGS = [
    GrpoConfig(),
    PLAIN,
    GrpoConfig(scale_rewards="batch"),
    GrpoConfig(baseline="leave_one_out", scale_rewards="none"),
    GrpoConfig(baseline="batch", scale_rewards="batch"),
    GrpoConfig(discount=0.9, truncation_penalty=-0.25, mask_truncated_completions=False),
]
NO_REWARD = [None, float("nan"), float("inf")]
LOST = [StopReason.SANDBOX_ERROR, StopReason.ENGINE_ERROR, StopReason.CANCELLED]

few = settings(no_clock, max_examples=60)
earned = st.integers(-4, 4).map(lambda quarter: quarter / 4)


@st.composite
def attempts(draw: st.DrawFn, group_id: str, sibling_index: int) -> Trajectory:
    turns = draw(st.integers(1, 4))
    turn_rewards = draw(st.just([]) | st.lists(earned, min_size=turns, max_size=turns))
    return graded(
        group_id,
        sibling_index,
        draw(earned) + sum(turn_rewards),
        turns=turns,
        turn_rewards=turn_rewards,
        stop_reason=draw(st.sampled_from([StopReason.FINAL_ANSWER, StopReason.MAX_TURNS])),
    )


@st.composite
def steps(draw: st.DrawFn) -> list[Trajectory]:
    return [draw(attempts(f"g{group}", index)) for group in range(2) for index in range(draw(st.integers(1, 4)))]


def near(expected: dict[str, tuple[float, ...]]) -> dict[str, object]:
    return {name: pytest.approx(values, rel=1e-9, abs=1e-9) for name, values in expected.items()}


# Grouping


@few
@given(step=steps(), seed=st.integers(0, 99), config=st.sampled_from(CONFIGS))
def test_the_order_of_trajectories_means_nothing_c16_c17(step: list[Trajectory], seed: int, config: GrpoConfig) -> None:
    """Groups of uneven size, dealt to anybody in any order: who belongs together is told by id."""
    mixed = random.Random(seed).sample(step, len(step))
    assert step_advantages(mixed, config) == near(step_advantages(step, config))


def test_three_a_task_dealt_to_two_processes_c17() -> None:
    """Two prompts, G = 3, three a process: no run of three in this order is a group."""
    rewards = {"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0, 1.0]}
    dealt = [graded(group, index, rewards[group][index]) for index in range(3) for group in ("a", "b")]
    assert step_advantages(dealt, PLAIN) == near({
        "a/0": (2 / 3,), "a/1": (-1 / 3,), "a/2": (-1 / 3,), "b/0": (-2 / 3,), "b/1": (1 / 3,), "b/2": (1 / 3,),
    })  # fmt: skip
    uneven = dealt[:5]
    assert step_advantages(uneven, PLAIN)["b/1"] == pytest.approx((0.5,))


def test_groups_and_attempts_that_are_mixed_up_are_refused_c16() -> None:
    stranger = graded("b", 0, 1.0)
    with pytest.raises(ValueError, match="group a: trajectory b/0 is of group b"):
        TrajectoryGroup(group_id="a", task=grouped([stranger])[0].task, trajectories=(graded("a", 0, 1.0), stranger))
    with pytest.raises(ValueError, match="two trajectories have the id b/0"):
        step_advantages([stranger, stranger], PLAIN)
    (group,) = grouped([graded("a", 0, 1.0, turns=2), graded("a", 1, 0.0)])
    with pytest.raises(ValueError, match="a/0: 1 advantages for its 2 turns"):
        group_samples(group, {"a/0": (0.5,), "a/1": (-0.5,)}, mask_truncated=True)


@pytest.mark.parametrize("config", [GrpoConfig(), PLAIN, GrpoConfig(baseline="leave_one_out")])
def test_a_group_has_its_own_mean_c35_c03(config: GrpoConfig) -> None:
    step = [graded("a", 0, 1.0), graded("a", 1, 1.0), graded("b", 0, 0.0), graded("b", 1, 0.0)]
    assert step_advantages(step, config) == {"a/0": (0.0,), "a/1": (0.0,), "b/0": (0.0,), "b/1": (0.0,)}
    samples, metrics = samples_and_metrics(grouped(step), config, trained_version=0)
    assert metrics["groups/dead"] == 1.0
    assert metrics["tokens/trained"] == metrics["advantages/max"] == 0
    assert {reason for sample in samples for reason in sample.excluded} == {None, Excluded.DEAD_GROUP}
    assert all(is_dead(group, config) for group in grouped(step))


def test_the_batch_s_baseline_tells_groups_apart() -> None:
    """REINFORCE++: that a group's rewards are equal says nothing there, so it is neither dead nor sampled again."""
    config = GrpoConfig(baseline="batch", scale_rewards="none")
    step = [graded("a", 0, 1.0), graded("a", 1, 1.0), graded("b", 0, 0.0), graded("b", 1, None)]
    assert step_advantages(step, config) == near({"a/0": (1 / 3,), "a/1": (1 / 3,), "b/0": (-2 / 3,)})
    assert samples_and_metrics(grouped(step), config, trained_version=0)[1]["groups/dead"] == 0.0
    assert [is_dead(group, config) for group in grouped(step)] == [False, False]
    assert is_dead(grouped([graded("c", 0, None), graded("c", 1, math.nan)])[0], config)


@pytest.mark.parametrize("config", CONFIGS)
def test_groups_that_were_replaced_are_in_no_scale(config: GrpoConfig) -> None:
    live = [graded("a", 0, 1.0), graded("a", 1, 0.0), graded("b", 0, 0.0), graded("b", 1, 3.0)]
    none = None if config.baseline == "batch" else 7.0
    dead = grouped([graded("c", 0, none), graded("c", 1, none)])
    assert all(is_dead(group, config) for group in dead)
    alone, _ = samples_and_metrics(grouped(live), config, trained_version=0)
    samples, metrics = samples_and_metrics(grouped(live), config, replaced=dead, trained_version=0)
    assert samples[: len(alone)] == alone
    assert not any(any(sample.loss_mask) for sample in samples[len(alone) :])
    assert metrics["groups/dead"] == pytest.approx(1 / 3)
    assert metrics["trajectories"] == 6


# No reward


@few
@given(
    step=steps(),
    lost=st.lists(st.sampled_from(LOST), max_size=3),
    nothing=st.lists(st.sampled_from(NO_REWARD), max_size=3),
    config=st.sampled_from(CONFIGS),
)
def test_what_has_no_reward_changes_nothing_c02_c04(
    step: list[Trajectory], lost: list[StopReason], nothing: list[float | None], config: GrpoConfig
) -> None:
    """Even where our machinery left a number on what it lost."""
    others = [graded("g0", 10 + i, 5.0, stop_reason=reason, turns=2) for i, reason in enumerate(lost)]
    others += [graded("g1", 20 + i, value) for i, value in enumerate(nothing)]
    assert step_advantages([*others, *step], config) == near(step_advantages(step, config))
    metrics = samples_and_metrics(grouped([*step, *others]), config, trained_version=0)[1]
    assert metrics["rewards/excluded"] == len(nothing)
    assert metrics["trajectories/failed"] == len(lost) + len(nothing)
    assert metrics["reward/mean"] == pytest.approx(sum(t.reward or 0.0 for t in step) / len(step))
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("nothing", NO_REWARD)
def test_rewards_that_are_partly_or_all_missing_c02(nothing: float | None, config: GrpoConfig) -> None:
    """A group of 4 with one missing, a group with none, and a third that is as in a run without them."""
    part = [graded("part", index, reward) for index, reward in enumerate([1.0, nothing, 0.0, 1.0])]
    none = [graded("none", index, nothing) for index in range(4)]
    good = [graded("good", index, reward) for index, reward in enumerate([0.0, 1.0])]
    found = step_advantages([*part, *none, *good], config)
    assert found.keys() == {"part/0", "part/2", "part/3", "good/0", "good/1"}
    assert all(math.isfinite(value) for values in found.values() for value in values)
    if "batch" not in (config.baseline, config.scale_rewards):
        assert {name: found[name] for name in ("good/0", "good/1")} == step_advantages(good, config)
    samples, _ = samples_and_metrics(grouped([*part, *none, *good]), config, trained_version=0)
    reasons = {sample.trajectory_id: set(sample.excluded) - {None} for sample in samples}
    assert reasons["part/1"] == reasons["none/0"] == {Excluded.INFRASTRUCTURE}
    assert all(math.isfinite(value) for sample in samples for value in sample.advantages)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_missing_reward_is_not_zero_c04(config: GrpoConfig) -> None:
    step = [graded("g", index, 1.0) for index in range(3)] + [graded("g", 3, None)]
    assert step_advantages(step, config) == {f"g/{index}": (0.0,) for index in range(3)}


@pytest.mark.parametrize("config", [GrpoConfig(), PLAIN, GrpoConfig(baseline="leave_one_out")])
def test_seven_of_eight_are_compared_with_each_other_c28(config: GrpoConfig) -> None:
    """One never returned: the group is of seven, and of one alone there is nothing to learn."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    hung = graded("g", 7, None, stop_reason=StopReason.CANCELLED)
    step = [*(graded("g", index, reward) for index, reward in enumerate(rewards)), hung]
    expected = group_advantages(rewards, baseline=config.baseline, scale_rewards=config.scale_rewards)
    assert list(step_advantages(step, config).values()) == [(value,) for value in expected]
    assert step_advantages([step[0], hung], config) == {"g/0": (0.0,)}
    assert is_dead(grouped([step[0], hung])[0], config)


# Invariants


@few
@given(step=steps(), shift=st.integers(-3, 3), config=st.sampled_from(CONFIGS[:-1]))
def test_a_constant_outcome_changes_nothing(step: list[Trajectory], shift: int, config: GrpoConfig) -> None:
    shifted = [replace(trajectory, reward=(trajectory.reward or 0.0) + shift) for trajectory in step]
    assert step_advantages(shifted, config) == near(step_advantages(step, config))


@few
@given(step=steps(), config=st.sampled_from([*CONFIGS[:4], CONFIGS[5]]))
def test_each_group_sums_to_zero_at_turns_that_all_of_it_took(step: list[Trajectory], config: GrpoConfig) -> None:
    found = step_advantages(step, config)
    for group in grouped(step):
        columns = [found[trajectory.trajectory_id] for trajectory in group.trajectories]
        for turn in range(min(map(len, columns))):
            assert math.fsum(column[turn] for column in columns) == pytest.approx(0.0, abs=1e-9)
    if not any(trajectory.turn_rewards for trajectory in step) and config.discount == 1:
        assert all(len(set(values)) == 1 for values in found.values())


@few
@given(step=steps())
def test_scaled_advantages_are_bounded(step: list[Trajectory]) -> None:
    """However rewards are spread over turns, no advantage is more than (n - 1) / sqrt(n): the scale is of the very
    numbers that are compared."""
    for group in grouped(step):
        bound = (len(group.trajectories) - 1) / math.sqrt(len(group.trajectories))
        found = step_advantages(group.trajectories, GrpoConfig())
        assert max(abs(value) for values in found.values() for value in values) <= bound


# Turns


def test_an_outcome_is_grpo_s_advantage_at_every_turn() -> None:
    """Of trajectories of different length, each counts once."""
    step = [graded("g", index, reward, turns=n) for index, (reward, n) in enumerate([(1.0, 1), (0.0, 5), (0.0, 2)])]
    expected = group_advantages([1.0, 0.0, 0.0])
    assert step_advantages(step, GrpoConfig()) == {
        "g/0": (expected[0],), "g/1": (expected[1],) * 5, "g/2": (expected[2],) * 2,
    }  # fmt: skip


def test_turns_by_hand() -> None:
    """Returns 3, 2 and 0 | 1 and 1, with the turns after the end counted as the last: 1, 1, 1."""
    long = graded("g", 0, 3.0, turns=3, turn_rewards=[1.0, 2.0, 0.0])
    short = graded("g", 1, 1.0, turns=2)
    assert step_advantages([long, short], PLAIN) == {"g/0": (1.0, 0.5, -0.5), "g/1": (-1.0, -0.5)}
    # With a discount of 1/2: 1 + 2/2 = 2, 2, 0 | 1/2, 1.
    halved = PLAIN.model_copy(update={"discount": 0.5})
    assert step_advantages([long, short], halved) == {"g/0": (0.75, 0.5, -0.5), "g/1": (-0.75, -0.5)}


def test_the_same_sum_at_other_turns_is_a_signal_where_it_differs() -> None:
    """Both earn 1 in all; the first turn of both is worth that, the second is not."""
    early = graded("g", 0, 1.0, turns=2, turn_rewards=[1.0, 0.0])
    late = graded("g", 1, 1.0, turns=2, turn_rewards=[0.0, 1.0])
    size = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert step_advantages([early, late], GrpoConfig()) == near({"g/0": (0.0, -size), "g/1": (0.0, size)})


def test_all_turns_count_c33() -> None:
    """-0.25 for the first and 1 for the second, against nothing: no turn's reward is lost, none moves."""
    step = [graded("g", 0, 0.75, turns=2, turn_rewards=[-0.25, 1.0]), graded("g", 1, 0.0, turns=2)]
    assert step_advantages(step, PLAIN) == {"g/0": (0.375, 0.5), "g/1": (-0.375, -0.5)}


@pytest.mark.parametrize("reason", StopReason)
def test_the_penalty_is_for_what_a_limit_cut_and_nothing_else(reason: StopReason) -> None:
    config = PLAIN.model_copy(update={"truncation_penalty": -0.5, "mask_truncated_completions": False})
    step = [graded("g", 0, 1.0, stop_reason=reason), graded("g", 1, 1.0)]
    expected = (-0.25,) if reason.is_truncated else (0.0,)
    if reason.is_infrastructure:
        assert step_advantages(step, config) == {"g/1": (0.0,)}
    else:
        assert step_advantages(step, config) == {"g/0": expected, "g/1": (-expected[0],)}
        assert samples_and_metrics(grouped(step), config, trained_version=0)[1]["reward/mean"] == 1.0


def test_what_takes_more_turns_is_worth_less_with_a_discount() -> None:
    step = [graded("g", 0, 1.0, turns=1), graded("g", 1, 1.0, turns=3)]
    found = step_advantages(step, PLAIN.model_copy(update={"discount": 0.5}))
    assert found == {"g/0": (0.375,), "g/1": (-0.375, -0.25, 0.0)}


def test_no_turn_at_all_is_compared_too() -> None:
    """The prompt filled the context: nothing was sampled, and the environment graded it."""
    step = [graded("g", 0, 0.0, turns=0, stop_reason=StopReason.CONTEXT_FULL), graded("g", 1, 1.0, turns=2)]
    assert step_advantages(step, PLAIN) == {"g/0": (), "g/1": (0.5, 0.5)}
    assert [sum(s.loss_mask) for s in samples_and_metrics(grouped(step), PLAIN, trained_version=0)[0]] == [2]


# Samples and metrics


def test_each_token_has_its_turn_s_advantage_in_whichever_stream() -> None:
    long = graded("g", 0, 3.0, turns=4, turn_rewards=[1.0, 2.0, 0.0, 0.0], new_streams=[1, 3], tokens=2)
    (group,) = grouped([long, graded("g", 1, 0.0, turns=1)])
    found = step_advantages(group.trajectories, PLAIN)
    assert found["g/0"] == (1.5, 1.0, 0.0, 0.0)
    samples = group_samples(group, found, mask_truncated=True)
    assert [sample.trajectory_id for sample in samples] == ["g/0", "g/0", "g/0", "g/1"]
    assert [sample.advantages for sample in samples] == [
        (0.0, 1.5, 1.5),
        (0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        (0.0, -1.5),
    ]
    # A turn without an advantage is trained like any other of a live group: it has its place in every mean.
    assert [sum(sample.loss_mask) for sample in samples] == [2, 4, 2, 1]


def test_the_length_of_what_tools_said_is_in_no_advantage_c19() -> None:
    def step(tool_tokens: int) -> list[Trajectory]:
        return [graded("g", i, float(i), turns=2 + i, tool_tokens=tool_tokens, tokens=10**i) for i in range(3)]

    assert step_advantages(step(1), GrpoConfig()) == step_advantages(step(5000), GrpoConfig())
    short, long = (samples_and_metrics(grouped(step(n)), GrpoConfig(), trained_version=0)[1] for n in (1, 5000))
    assert short["length/mean"] == long["length/mean"]
    assert short["advantages/abs"] == long["advantages/abs"]


def test_metrics_by_hand() -> None:
    step = [
        graded("a", 0, 2.0, turns=2, turn_rewards=[1.0, 0.0]),
        graded("a", 1, 0.0, turns=1),
        graded("b", 0, 1.0),
        graded("b", 1, 1.0),
        graded("b", 2, math.nan),
        graded("b", 3, None, stop_reason=StopReason.ENGINE_ERROR),
    ]
    _, metrics = samples_and_metrics(grouped(step), PLAIN, trained_version=0)
    names = (
        "reward/mean", "reward/std", "reward/min", "reward/max", "reward/success", "reward/turn_rewards",
        "rewards/excluded", "trajectories/failed", "groups/dead",
    )  # fmt: skip
    assert {name: metrics[name] for name in names} == pytest.approx(
        {
            "reward/mean": 1.0,
            "reward/std": math.sqrt(2 / 3),
            "reward/min": 0.0,
            "reward/max": 2.0,
            "reward/success": 0.75,
            "reward/turn_rewards": 0.25,
            "rewards/excluded": 1,
            "trajectories/failed": 2,
            "groups/dead": 0.5,
        }
    )
    # Trained: the turns 1, 0.5 | -1 of group a.
    assert metrics["advantages/mean"] == pytest.approx(0.5 / 3)
    assert metrics["advantages/abs"] == pytest.approx(2.5 / 3)
    assert metrics["advantages/max"] == pytest.approx(1.0)


def test_a_term_with_a_name_of_ours_does_not_hide_it() -> None:
    step = [replace(graded("g", i, float(i)), reward_terms={"max": 0.25, "ok": i - 0.25}) for i in range(2)]
    _, metrics = samples_and_metrics(grouped(step), PLAIN, trained_version=0)
    assert (metrics["reward/max"], metrics["reward/term/max"], metrics["reward/ok"]) == (1.0, 0.25, 0.25)
