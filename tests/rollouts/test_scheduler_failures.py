"""What our machinery loses is begun again a bounded number of times, an outage ends the run, nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from data.gate import check_batch
from data.ledger import Ledger
from data.types import Completion, Excluded, SamplingParams, Source
from envs.types import Task
from rollouts.config import ScheduleConfig
from rollouts.engine import EngineError, EngineLoad, RecordingEngine
from rollouts.outage import Outage, OutageError, retry_delay_s
from rollouts.samples import group_samples
from rollouts.scheduler import Scheduler, sample_groups
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from tests.by_turn import by_turn
from tests.rollouts.desk import make_runner
from tests.rollouts.virtual_clock import run_virtual
from tests.rollouts.workshop import CountedSandboxes, Workshop, WorkshopEngine


def check_law(groups: list[TrajectoryGroup], ledger: Ledger) -> int:
    """The law of the mask holds for all that was sampled, lost attempts included; returns how much infrastructure
    cost, in tokens."""
    samples = [
        sample
        for group in groups
        for sample in group_samples(
            group, by_turn(group, [None if t.reward is None else 1.0 for t in group.trajectories]), mask_truncated=True
        )
    ]
    return check_batch(samples, ledger).excluded[Excluded.INFRASTRUCTURE]


def test_what_the_engine_loses_is_begun_again_and_accounted_for() -> None:
    """Every first attempt breaks in its second turn."""
    ledger = Ledger()
    engine = WorkshopEngine(8, fails=lambda name: "~" not in name and name.endswith("/1"))
    runner = make_runner(RecordingEngine(engine, ledger), CountedSandboxes(), env=Workshop(), wall_clock_s=1e4)
    groups = run_virtual(sample_groups(runner, Workshop().tasks("train", 4, 0), num_generations=4, prefix="p"))
    lost = [trajectory for group in groups for trajectory in group.lost]
    assert lost
    assert {t.stop_reason for t in lost} == {StopReason.ENGINE_ERROR}
    again = [t for group in groups for t in group.trajectories if t.attempt]
    assert {t.trajectory_id for t in again} == {f"{t.trajectory_id}~1" for t in lost}
    assert {t.stop_reason for t in again} == {StopReason.FINAL_ANSWER}
    sampled = sum(len(s.token_ids) for t in lost for s in t.streams[0] if s.source is Source.MODEL)
    assert check_law(groups, ledger) == sampled > 0


def test_a_fault_of_code_is_not_tried_again() -> None:
    """Nor is it an outage while others end well."""
    engine, shop = WorkshopEngine(8), Workshop()
    tasks = [Task(task_id="bad", prompt="faulty"), Task(task_id="good", prompt="Work.")]
    runner = make_runner(engine, CountedSandboxes(), env=shop, wall_clock_s=1e4, tool_timeout_s=1e3)
    schedule = ScheduleConfig(infrastructure_retries=3)
    bad, good = run_virtual(sample_groups(runner, tasks, num_generations=16, prefix="p", schedule=schedule))
    assert shop.begun.count("bad") == 16
    assert not bad.lost
    assert all(t.is_fault for t in bad.trajectories)
    assert {t.cause for t in bad.trajectories} == {"RuntimeError: a fault of the environment's code"}
    assert {t.stop_reason for t in good.trajectories} == {StopReason.FINAL_ANSWER}


def test_when_all_are_lost_the_run_ends_with_the_cause() -> None:
    """A thousand tasks are left; a handful is asked for, ever more slowly."""
    engine, sandboxes = WorkshopEngine(16, fails=lambda name: True), CountedSandboxes()
    runner = make_runner(engine, sandboxes, env=Workshop(), wall_clock_s=1e4)
    tasks = Workshop().tasks("train", 1000, 0)
    with pytest.raises(
        OutageError, match=r"^the last \d+ trajectories were lost, one after the other: the engine brok"
    ):
        run_virtual(sample_groups(runner, tasks, num_generations=8, prefix="p"))
    assert len(engine.asked) < 100
    assert sandboxes.open == engine.running == 0


def test_an_engine_that_comes_back_costs_no_trajectory() -> None:
    """It is down for five seconds, which three tries outlast."""
    engine = WorkshopEngine(4, fails=lambda name: 3.0 < asyncio.get_running_loop().time() < 8.0)
    runner = make_runner(engine, CountedSandboxes(), env=Workshop(), wall_clock_s=1e4, tool_timeout_s=1e3)
    schedule = ScheduleConfig(infrastructure_retries=6)
    tasks = Workshop().tasks("train", 10, 0)
    groups = run_virtual(sample_groups(runner, tasks, num_generations=2, prefix="p", schedule=schedule))
    assert {t.stop_reason for group in groups for t in group.trajectories} == {StopReason.FINAL_ANSWER}
    assert any(group.lost for group in groups)


def test_servers_that_are_all_down_are_given_up_soon() -> None:
    """They have no room, and each request waits two minutes for one to come back."""

    class DownEngine(WorkshopEngine):
        @property
        def load(self) -> EngineLoad:
            return EngineLoad(running=0, waiting=0, capacity=0)

        async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            self.asked.append(completion_id)
            await asyncio.sleep(120.0)
            raise EngineError("no server is up")

    engine, ended_s = DownEngine(4), list[float]()

    async def run() -> None:
        runner = make_runner(engine, CountedSandboxes(), env=Workshop(), wall_clock_s=1e4)
        with pytest.raises(OutageError, match="no server is up"):
            await sample_groups(runner, Workshop().tasks("train", 100, 0), num_generations=8, prefix="p")
        ended_s.append(asyncio.get_running_loop().time())

    run_virtual(run())
    assert len(engine.asked) <= 32
    assert ended_s[0] < 300.0


def lost_trajectory() -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        task_id="t",
        group_id="g",
        sibling_index=0,
        streams=(),
        turns=(),
        stop_reason=StopReason.SANDBOX_ERROR,
        reward=None,
        error="no sandbox",
    )


def test_it_is_no_outage_while_one_that_had_begun_before_it_goes_on() -> None:
    """A hundred tasks without a sandbox fail at once; the long ones have not had the time to end well."""
    outage = Outage()
    for _ in range(300):
        outage.lost(lost_trajectory(), begun=20, oldest=3)
    with pytest.raises(OutageError, match="the last 301 trajectories were lost, one after the other: no sandbox"):
        outage.lost(lost_trajectory(), begun=320, oldest=20)
    outage.is_over()
    outage.lost(lost_trajectory(), begun=330, oldest=330)


def test_failures_at_one_time_are_one_reason_to_wait() -> None:
    outage = Outage()
    for _ in range(50):
        outage.hold(10.0)
    assert outage.held_until == 10.0 + retry_delay_s(0)
    outage.hold(11.0)
    assert outage.held_until == 11.0 + retry_delay_s(1)
    outage.is_over()
    assert outage.held_until == 0.0


def test_one_that_hangs_even_when_it_is_cancelled_does_not_hold_the_run_c28() -> None:
    """Grading swallows its cancellation by the runner and by the schedule. Its tokens are accounted for."""
    ledger, done = Ledger(), list[tuple[str, float]]()
    tasks = [Task(task_id="a", prompt="deaf"), Task(task_id="b", prompt="Work.")]

    async def run() -> list[TrajectoryGroup]:
        engine = RecordingEngine(WorkshopEngine(8), ledger)
        runner = make_runner(engine, CountedSandboxes(), env=Workshop(), wall_clock_s=100.0)
        clock = asyncio.get_running_loop().time
        groups = await sample_groups(
            runner,
            tasks,
            num_generations=1,
            prefix="p",
            schedule=ScheduleConfig(infrastructure_retries=0),
            on_done=lambda t: done.append((t.task_id, clock())),
        )
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # the third time it hears
        await asyncio.sleep(1)
        return groups

    deaf, good = run_virtual(run())
    assert good.trajectories[0].stop_reason is StopReason.FINAL_ANSWER
    assert deaf.trajectories[0].stop_reason is StopReason.CANCELLED
    assert deaf.trajectories[0].cause == (
        "not over after 500 s (5 times limits.wall_clock_s), and it did not end when it was cancelled"
    )
    assert [name for name, _ in done] == ["b", "a"]
    assert done[1][1] == pytest.approx(510.0)
    assert check_law([deaf, good], ledger) > 0


def interrupted(
    how: Callable[[Scheduler, asyncio.Task[None]], object], *, after_s: float
) -> tuple[WorkshopEngine, int]:
    """Forty trajectories in flight, interrupted; what is left of them."""
    engine, shop, sandboxes = WorkshopEngine(20), Workshop(), CountedSandboxes()

    async def run() -> int:
        runner = make_runner(engine, sandboxes, env=shop, wall_clock_s=1e4, tool_timeout_s=1e3)
        most = 0

        async def work() -> None:
            nonlocal most
            async with Scheduler(runner, ScheduleConfig()) as scheduler:
                for task in shop.tasks("train", 100, 0):
                    scheduler.submit(task, group_id=task.task_id, siblings=range(4))
                asyncio.get_running_loop().call_later(after_s, how, scheduler, working)
                async for _ in scheduler:
                    most = max(most, sandboxes.open)

        working = asyncio.ensure_future(work())
        await asyncio.wait([working])
        if not working.cancelled() and (failure := working.exception()):
            raise failure
        return most

    most = run_virtual(run())
    assert sandboxes.open == engine.running == engine.waiting == shop.at_work == 0
    return engine, most


@pytest.mark.parametrize("after_s", [0.0, 0.3, 2.0, 7.7])
def test_a_cancelled_run_leaves_nothing_behind(after_s: float) -> None:
    """No task (the clock's loop checks it), no sandbox, no request, no tool."""
    interrupted(lambda scheduler, working: working.cancel(), after_s=after_s)


def test_a_cancelled_group_is_handed_out_without_what_it_lacks() -> None:
    engine, shop, sandboxes = WorkshopEngine(6), Workshop(), CountedSandboxes()
    ledger = Ledger()

    async def run() -> list[TrajectoryGroup]:
        runner = make_runner(RecordingEngine(engine, ledger), sandboxes, env=shop, wall_clock_s=1e4, tool_timeout_s=1e3)
        async with Scheduler(runner, ScheduleConfig()) as scheduler:
            for task in shop.tasks("train", 5, 0):
                scheduler.submit(task, group_id=f"p/{task.task_id}", siblings=range(8))
            for delay_s, group_id in ((4.0, "p/000"), (4.0, "p/004"), (5.0, "p/none")):
                asyncio.get_running_loop().call_later(delay_s, scheduler.cancel, group_id)
            return [group async for group in scheduler]

    groups = {group.group_id: group for group in run_virtual(run())}
    assert len(groups) == 5
    for name, group in groups.items():
        reasons = [trajectory.stop_reason for trajectory in group.trajectories]
        if name in ("p/000", "p/004"):
            assert StopReason.CANCELLED in reasons
        else:
            assert set(reasons) == {StopReason.FINAL_ANSWER}
    assert {t.stop_reason for t in groups["p/004"].trajectories} == {StopReason.CANCELLED}
    assert {t.error for t in groups["p/004"].trajectories} == {"its group was cancelled before it began"}
    assert not groups["p/000"].lost, "what was cancelled is not begun again"
    assert sandboxes.open == engine.running == shop.at_work == 0
    assert check_law(list(groups.values()), ledger) > 0


def test_a_listener_that_fails_ends_the_run() -> None:
    """A full disk, where trajectories are written as they end."""
    engine, sandboxes = WorkshopEngine(6), CountedSandboxes()

    def full(trajectory: Trajectory) -> None:
        raise OSError("no space left on device")

    runner = make_runner(engine, sandboxes, env=Workshop(), wall_clock_s=1e4)
    with pytest.raises(OSError, match="no space left"):
        run_virtual(
            sample_groups(runner, Workshop().tasks("train", 20, 0), num_generations=4, prefix="p", on_done=full)
        )
    assert sandboxes.open == engine.running == 0


def test_a_group_can_be_submitted_once() -> None:
    async def run() -> None:
        runner = make_runner(WorkshopEngine(2), CountedSandboxes(), env=Workshop())
        async with Scheduler(runner, ScheduleConfig()) as scheduler:
            scheduler.submit(Task(task_id="a", prompt="Work."), group_id="a", siblings=[0])
            with pytest.raises(ValueError, match="group a: submitted twice"):
                scheduler.submit(Task(task_id="a", prompt="Work."), group_id="a", siblings=[1])
            with pytest.raises(ValueError, match="group b has no trajectory"):
                scheduler.submit(Task(task_id="b", prompt="Work."), group_id="b", siblings=[])

    run_virtual(run())
