"""A step's groups come in the order of its tasks, and while they are sampled somebody may look on."""

from __future__ import annotations

import asyncio

import pytest
from rich.progress import Progress

from rollouts.config import ScheduleConfig
from rollouts.scheduler import Scheduler
from rollouts.tally import Tally
from scripts.console import progress
from scripts.rollout_progress import keep_current
from tests.rollouts.desk import make_runner
from tests.rollouts.virtual_clock import run_virtual
from tests.rollouts.workshop import CountedSandboxes, Workshop, WorkshopEngine
from train.config import GrpoConfig
from train.group_feed import FeedState, GroupFeed, task_at


def test_a_step_is_watched_while_it_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    """Every first attempt of the first sibling breaks; a log has a line every half minute, and none afterwards."""
    engine = WorkshopEngine(4, fails=lambda name: "/0/" in name)
    runner = make_runner(engine, CountedSandboxes(), env=Workshop(), wall_clock_s=1e4, tool_timeout_s=1e4)
    tasks = Workshop().tasks("train", 16, 0)
    seen: list[Tally] = []

    async def sample(bar: Progress) -> list[str]:
        place = bar.add_task("trajectories", total=64, note="")
        tally = Tally()
        config = GrpoConfig(tasks_per_step=16, num_generations=4, max_steps=1)
        async with Scheduler(runner, ScheduleConfig(), on_done=tally.add, on_lost=tally.add_begun_again) as scheduler:
            feed = GroupFeed(scheduler, tasks, config=config, seed=0, is_dead=lambda group: False, state=FeedState())
            seen.append(tally)
            async with keep_current(bar, place, 64, tally, lambda: scheduler.status):
                groups = await feed.take(1)
            assert (scheduler.status.queued, scheduler.status.in_flight) == (0, 0)
        assert (bar.tasks[place].completed, bar.tasks[place].fields["note"]) == (64, "")
        await asyncio.sleep(100)
        return [group.group_id for group in groups.trained]

    with progress() as bar:
        assert run_virtual(sample(bar)) == [f"group-{index}/{task_at(tasks, index, 0).task_id}" for index in range(16)]
    (tally,) = seen
    assert (tally.trajectories, tally.lost, tally.begun_again) == (64, 0, 16)
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines
    assert all("/64 trajectories: " in line and " tokens/s, " in line for line in lines)
    assert not any(line.startswith("64/64") for line in lines), "none when all is sampled"
