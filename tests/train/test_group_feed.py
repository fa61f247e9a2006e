"""Which groups a step trains: as many as it wants, each once, none too old, and the same after a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.types import Task
from rollouts.config import ScheduleConfig
from rollouts.scheduler import Scheduler
from rollouts.types import TrajectoryGroup
from tests.data.test_types import no_clock
from tests.rollouts.desk import make_runner
from tests.rollouts.virtual_clock import run_virtual
from tests.rollouts.workshop import CountedSandboxes, Workshop, WorkshopEngine
from train.config import GrpoConfig
from train.group_feed import (
    FeedState,
    GroupFeed,
    StepGroups,
    group_index,
    read_feed_state,
    task_at,
    write_feed_state,
)

TASKS = [Task(task_id=f"{index:03d}", prompt="Work.") for index in range(7)]


@dataclass(kw_only=True)
class Run:
    """A run in virtual time whose updates take `updates_s`; what was trained by each step, and what is left of it."""

    config: GrpoConfig
    updates_s: Sequence[float] = (3.0,)
    is_dead: Callable[[TrajectoryGroup], bool] = lambda group: False
    fails: Callable[[str], bool] = lambda completion_id: False
    steps: list[StepGroups] = field(default_factory=list)
    state: FeedState = field(default_factory=FeedState)
    begun: list[str] = field(default_factory=list)
    took_s: float = 0.0

    def go_on(self, until: int) -> Run:
        run_virtual(self._train(until))
        return self

    async def _train(self, until: int) -> None:
        engine, shop = WorkshopEngine(6, fails=self.fails), Workshop()
        runner = make_runner(engine, CountedSandboxes(), env=shop, wall_clock_s=1e4, tool_timeout_s=1e4)
        async with Scheduler(runner, ScheduleConfig()) as scheduler:
            feed = GroupFeed(scheduler, TASKS, config=self.config, seed=3, is_dead=self.is_dead, state=self.state)
            for step in range(len(self.steps) + 1, until + 1):
                engine.policy_version = step - 1
                groups = await feed.take(step)
                self.steps.append(groups)
                await asyncio.sleep(self.updates_s[step % len(self.updates_s)])
            self.state = feed.state()
            self.took_s += asyncio.get_running_loop().time()
        self.begun += engine.asked

    def indices(self) -> list[int]:
        return [group_index(group.group_id) for step in self.steps for group in (*step.trained, *step.replaced)]


def versions(group: TrajectoryGroup) -> set[int]:
    return {
        version
        for trajectory in group.trajectories
        for stream in trajectory.streams
        for segment in stream
        for version in segment.policy_version
    }


def make_config(staleness: int, count: int = 2, steps: int = 6, resampled: int = 0) -> GrpoConfig:
    return GrpoConfig(
        max_staleness=staleness,
        tasks_per_step=count,
        max_steps=steps,
        num_generations=2,
        max_resampled_groups=resampled,
    )


configs = st.builds(make_config, st.integers(0, 3), st.integers(1, 3), st.integers(1, 7), st.integers(0, 2))
updates = st.lists(st.floats(0, 40), min_size=1, max_size=4)


@settings(no_clock, max_examples=60)
@given(config=configs, updates_s=updates, seed=st.integers(0, 99))
def test_each_step_has_its_groups_each_is_trained_once_and_none_is_too_old(
    config: GrpoConfig, updates_s: list[float], seed: int
) -> None:
    def is_dead(group: TrajectoryGroup) -> bool:
        return Random(f"{seed}/{group.group_id}").random() < 0.3

    run = Run(config=config, updates_s=updates_s, is_dead=is_dead).go_on(config.max_steps)
    replaced = 0
    for step, groups in enumerate(run.steps, start=1):
        assert len(groups.trained) == config.tasks_per_step
        assert len(groups.replaced) <= config.max_resampled_groups
        replaced += len(groups.replaced)
        assert all(map(is_dead, groups.replaced))
        for group in (*groups.trained, *groups.replaced):
            assert min(versions(group)) >= step - 1 - config.max_staleness
    assert sorted(run.indices()) == list(range(config.max_steps * config.tasks_per_step + replaced))
    assert run.state == FeedState(begun=len(run.indices())), "nothing was sampled that no step took"


def test_without_staleness_a_step_trains_what_its_own_weights_sampled() -> None:
    run = Run(config=make_config(0)).go_on(6)
    for step, groups in enumerate(run.steps, start=1):
        assert [group_index(group.group_id) for group in groups.trained] == [2 * step - 2, 2 * step - 1]
        assert {version for group in groups.trained for version in versions(group)} == {step - 1}


def test_with_staleness_sampling_goes_on_during_updates() -> None:
    """In time that no machine measures: a step of sampling takes some seconds, an update sixty. Ahead of it, only the
    first step's sampling is waited for."""
    lock_step, ahead = (Run(config=make_config(staleness), updates_s=[60.0]).go_on(6) for staleness in (0, 1))
    first = Run(config=make_config(0), updates_s=[60.0]).go_on(1)
    assert lock_step.took_s > 5 * 60 + first.took_s
    assert ahead.took_s <= 5 * 60 + first.took_s
    ages = [step - 1 - min(versions(group)) for step, one in enumerate(ahead.steps, 1) for group in one.trained]
    assert set(ages) == {0, 1}


def test_a_slow_group_is_waited_for_when_it_would_grow_too_old() -> None:
    """Two groups of one trajectory each hang for a long time; quick ones overtake them, but only so far."""
    run = Run(config=make_config(2, count=1, steps=8), updates_s=[0.1]).go_on(8)
    order = run.indices()
    assert sorted(order) == list(range(8))
    assert order != sorted(order), "no group overtook another: the seed shows nothing"
    for step, groups in enumerate(run.steps, start=1):
        assert min(min(versions(group)) for group in groups.trained) >= step - 3


@settings(no_clock, max_examples=40)
@given(config=configs, updates_s=updates, kill=st.integers(0, 7))
def test_a_run_that_continues_trains_each_group_once_c13(
    config: GrpoConfig, updates_s: list[float], kill: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def is_dead(group: TrajectoryGroup) -> bool:
        return group_index(group.group_id) % 3 == 0

    whole = Run(config=config, updates_s=updates_s, is_dead=is_dead).go_on(config.max_steps)
    run = Run(config=config, updates_s=updates_s, is_dead=is_dead).go_on(min(kill, config.max_steps))
    path = tmp_path_factory.mktemp("checkpoint") / "groups.jsonl"
    write_feed_state(path, run.state)
    run.state = read_feed_state(path)
    trained = {group_index(one.group.group_id) for one in run.state.ready} | set(run.indices())
    assert {index for index in range(100) if run.state.is_kept(f"group-{index}/t")} == trained
    run.go_on(config.max_steps)
    assert len(run.indices()) == len(set(run.indices()))
    assert sorted(run.indices()) == list(range(len(run.indices())))
    for step, groups in enumerate(run.steps, start=1):
        assert len(groups.trained) == config.tasks_per_step
        assert all(min(versions(group)) >= step - 1 - config.max_staleness for group in groups.trained)
    if config.max_staleness == 0:
        assert [[g.group_id for g in one.trained] for one in run.steps] == [
            [g.group_id for g in one.trained] for one in whole.steps
        ]


def test_what_waits_in_a_checkpoint_is_read_back_equal(tmp_path: Path) -> None:
    run = Run(config=make_config(3, count=1, steps=8), updates_s=[50.0]).go_on(2)
    assert run.state.ready
    write_feed_state(tmp_path / "groups.jsonl", run.state)
    assert read_feed_state(tmp_path / "groups.jsonl") == run.state
    (tmp_path / "groups.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"groups\.jsonl: there is no whole line in it; delete this checkpoint"):
        read_feed_state(tmp_path / "groups.jsonl")


def test_infrastructure_that_fails_once_costs_no_group() -> None:
    """Every first attempt of a sibling breaks: what is begun again later is younger, never too old."""
    run = Run(config=make_config(1), fails=lambda name: "/0/" in name).go_on(6)
    assert sorted(run.indices()) == list(range(12))
    assert all(group.lost for step in run.steps for group in step.trained)
    for step, groups in enumerate(run.steps, start=1):
        assert all(min(versions(group)) >= step - 2 for group in groups.trained)


@no_clock
@given(count=st.integers(1, 30), epoch=st.integers(0, 3), seed=st.integers(0, 5))
def test_each_epoch_takes_each_task_once(count: int, epoch: int, seed: int) -> None:
    tasks = [Task(task_id=str(index), prompt="?") for index in range(count)]
    taken = [task_at(tasks, epoch * count + place, seed).task_id for place in range(count)]
    assert sorted(taken) == sorted(task.task_id for task in tasks)
