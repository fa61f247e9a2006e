"""Which trajectory begins when: the engine is kept busy, limits hold, groups keep their order, nothing is lost."""

from __future__ import annotations

from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from rollouts.config import ScheduleConfig
from rollouts.engine import EngineLoad
from rollouts.scheduler import Scheduler, sample_groups
from rollouts.types import StopReason, TrajectoryGroup, trajectory_name
from tests.data.test_types import no_clock
from tests.rollouts.desk import make_runner
from tests.rollouts.virtual_clock import run_virtual
from tests.rollouts.workshop import CountedSandboxes, Workshop, WorkshopEngine


async def run_all(
    engine: WorkshopEngine, shop: Workshop, *, tasks: int, num_generations: int, schedule: ScheduleConfig
) -> list[TrajectoryGroup]:
    sandboxes = CountedSandboxes()
    runner = make_runner(engine, sandboxes, env=shop, wall_clock_s=10000.0, tool_timeout_s=1000.0)
    groups: list[TrajectoryGroup] = []
    async with Scheduler(runner, schedule) as scheduler:
        engine.scheduler = scheduler
        for task in shop.tasks("train", tasks, 0):
            scheduler.submit(task, group_id=f"p/{task.task_id}", siblings=range(num_generations))
        groups = [group async for group in scheduler]
        engine.scheduler = None
    assert sandboxes.open == engine.running == engine.waiting == shop.at_work == 0
    return groups


def test_the_engine_is_busy_while_a_trajectory_is_ready_or_could_begin() -> None:
    """Tools take from nothing to a minute, half a second as a rule; a lock-step batch would wait for the slowest."""
    engine, shop = WorkshopEngine(8), Workshop()
    engine.max_trajectories = 16
    groups = run_virtual(run_all(engine, shop, tasks=40, num_generations=8, schedule=ScheduleConfig()))
    assert sum(len(group.trajectories) for group in groups) == 320
    assert engine.busy_s >= 0.95 * engine.wanted_s > 0


def test_others_sample_while_tools_run() -> None:
    """With as many in flight as the engine samples at once, places are free whenever a tool runs."""
    busy: dict[int, float] = {}
    for most in (8, 16, 32):
        engine = WorkshopEngine(8)
        run_virtual(
            run_all(engine, Workshop(), tasks=20, num_generations=8, schedule=ScheduleConfig(max_trajectories=most))
        )
        busy[most] = engine.loaded_busy_s / engine.loaded_s / 8
    assert busy[8] < 0.6
    assert busy[16] > 0.9, "as many again is what a schedule has by default"
    assert busy[32] > 0.95


@no_clock
@given(
    tasks=st.integers(1, 6),
    num_generations=st.integers(1, 5),
    capacity=st.integers(1, 6),
    most=st.none() | st.integers(1, 20),
    retries=st.integers(0, 2),
    failing=st.sets(st.integers(0, 59), max_size=4),
)
def test_each_trajectory_ends_once_and_limits_hold(
    tasks: int, num_generations: int, capacity: int, most: int | None, retries: int, failing: set[int]
) -> None:
    engine, shop = WorkshopEngine(capacity), Workshop()
    engine.fails = lambda name: crc32(name.encode()) % 60 in failing
    limit = most or 2 * capacity
    seen: list[int] = []

    async def run() -> list[TrajectoryGroup]:
        runner = make_runner(engine, CountedSandboxes(), env=shop, wall_clock_s=10000.0, tool_timeout_s=1000.0)
        schedule = ScheduleConfig(max_trajectories=most, infrastructure_retries=retries)
        ended: list[str] = []
        async with Scheduler(runner, schedule, on_done=lambda t: ended.append(t.trajectory_id)) as scheduler:
            for task in shop.tasks("train", tasks, 0):
                scheduler.submit(task, group_id=f"p/{task.task_id}", siblings=range(num_generations))
            groups: list[TrajectoryGroup] = []
            async for group in scheduler:
                seen.append(scheduler.status.in_flight)
                groups.append(group)
        assert len(ended) == len(set(ended)) == tasks * num_generations
        return groups

    groups = run_virtual(run())
    assert sorted(group.group_id for group in groups) == [f"p/{index:03d}" for index in range(tasks)]
    for group in groups:
        assert [t.sibling_index for t in group.trajectories] == list(range(num_generations))
        for trajectory in group.trajectories:
            is_lost = trajectory.stop_reason is StopReason.ENGINE_ERROR
            assert is_lost or trajectory.stop_reason is StopReason.FINAL_ANSWER
            assert trajectory.attempt <= retries
            assert not is_lost or trajectory.attempt == retries, "given up too early"
            # Those before it are kept, for the tokens that were sampled for them.
            ids = [t.trajectory_id for t in group.lost if t.sibling_index == trajectory.sibling_index]
            expected = [trajectory_name(group.group_id, trajectory.sibling_index, n) for n in range(trajectory.attempt)]
            assert ids == expected
    assert engine.most_running <= capacity
    assert len(engine.asked) == len(set(engine.asked)), "no completion id is used twice"
    assert max(seen) <= limit


def test_never_more_than_max_trajectories() -> None:
    most = 0
    engine, shop = WorkshopEngine(64), Workshop()
    sandboxes = CountedSandboxes()

    async def run() -> None:
        nonlocal most
        runner = make_runner(engine, sandboxes, env=shop, wall_clock_s=10000.0)
        async with Scheduler(runner, ScheduleConfig(max_trajectories=5)) as scheduler:
            for task in shop.tasks("train", 6, 0):
                scheduler.submit(task, group_id=task.task_id, siblings=range(4))
            async for _ in scheduler:
                most = max(most, sandboxes.open)

    run_virtual(run())
    assert 1 < most <= 5
    assert engine.most_running <= 5


def test_a_group_is_handed_out_when_its_last_trajectory_is_over() -> None:
    """A trainer can begin with it while others run; and what has begun is finished before anything new begins."""
    engine, shop = WorkshopEngine(4), Workshop()
    handed_out: list[int] = []

    async def run() -> None:
        runner = make_runner(engine, CountedSandboxes(), env=shop, wall_clock_s=10000.0, tool_timeout_s=1000.0)
        async with Scheduler(runner, ScheduleConfig()) as scheduler:
            for task in shop.tasks("train", 10, 0):
                scheduler.submit(task, group_id=task.task_id, siblings=range(4))
            async for _ in scheduler:
                handed_out.append(scheduler.status.in_flight + scheduler.status.queued)

    run_virtual(run())
    assert shop.begun == sorted(shop.begun), "siblings begin one after the other"
    assert len(handed_out) == 10
    assert handed_out[0] > 20, "the first group did not wait for the others"


def test_more_may_be_submitted_while_groups_are_taken() -> None:
    engine, shop = WorkshopEngine(4), Workshop()

    async def run() -> list[str]:
        runner = make_runner(engine, CountedSandboxes(), env=shop, wall_clock_s=10000.0, tool_timeout_s=1000.0)
        rest = shop.tasks("train", 5, 0)
        names: list[str] = []
        async with Scheduler(runner, ScheduleConfig()) as scheduler:
            scheduler.submit(rest[0], group_id=rest.pop(0).task_id, siblings=[1, 3])
            async for group in scheduler:
                names.append(group.group_id)
                assert [t.sibling_index for t in group.trajectories] == [1, 3]
                if rest:
                    scheduler.submit(rest[0], group_id=rest.pop(0).task_id, siblings=[1, 3])
        return names

    assert run_virtual(run()) == [f"{index:03d}" for index in range(5)]


def test_one_goes_on_however_busy_others_keep_the_engine() -> None:
    class SharedEngine(WorkshopEngine):
        @property
        def load(self) -> EngineLoad:
            return EngineLoad(running=4, waiting=100, capacity=4)

    engine, shop = SharedEngine(4), Workshop()
    groups = run_virtual(run_all(engine, shop, tasks=3, num_generations=2, schedule=ScheduleConfig()))
    assert len(groups) == 3
    assert engine.most_running == 1


def test_groups_come_in_the_order_of_the_tasks() -> None:
    engine, shop = WorkshopEngine(4), Workshop()
    tasks = shop.tasks("train", 8, 0)
    runner = make_runner(engine, CountedSandboxes(), env=shop, wall_clock_s=10000.0, tool_timeout_s=1000.0)
    groups = run_virtual(sample_groups(runner, tasks, num_generations=3, prefix="step-1"))
    assert [group.group_id for group in groups] == [f"step-1/{task.task_id}" for task in tasks]
