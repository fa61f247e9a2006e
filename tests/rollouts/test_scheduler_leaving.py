"""A trajectory that ignores that it is cancelled holds nobody, and samples nothing behind the run's back."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping, Sequence

import pytest

from data.ledger import Ledger
from envs.sandbox.base import Sandbox
from envs.types import Message, Task, ToolCall, ToolResult
from rollouts.config import ScheduleConfig
from rollouts.engine import RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.runner import Runner
from rollouts.scheduler import Scheduler
from rollouts.types import StopReason, TrajectoryGroup
from tests.rollouts.desk import make_runner, say
from tests.rollouts.test_scheduler_failures import check_law
from tests.rollouts.virtual_clock import run_virtual
from tests.rollouts.workshop import CountedSandboxes, Workshop, WorkshopSession

TASK = Task(task_id="a", prompt="Work.")


class StubbornWorkshop(Workshop):
    """Its tool, or its grader, swallows `swallows` cancellations, and leaves no trace of them, until it is released."""

    def __init__(self, *, swallows: float = float("inf"), where: str = "tool") -> None:
        super().__init__()
        self.swallows = swallows
        self.where = where
        self.released = asyncio.Event()

    def session(self, task: Task, sandbox: Sandbox) -> WorkshopSession:
        return _StubbornSession(self)

    async def wait(self) -> None:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                if self.swallows <= 0:
                    raise
                self.swallows -= 1
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()


class _StubbornSession(WorkshopSession):
    def __init__(self, shop: StubbornWorkshop) -> None:
        super().__init__(shop, deaf=0)
        self._stubborn = shop

    async def call(self, call: ToolCall) -> ToolResult:
        if self._stubborn.where == "tool":
            await self._stubborn.wait()
        return ToolResult(call_id=call.call_id, content="done")

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        if self._stubborn.where == "grader":
            await self._stubborn.wait()
        return {"ok": 1.0}


def stubborn_runner(
    shop: StubbornWorkshop, ledger: Ledger, *, wall_clock_s: float = 1e6
) -> tuple[Runner, ScriptedEngine]:
    engine = ScriptedEngine(lambda prompt: say("", ("work", "0")))
    recording = RecordingEngine(engine, ledger)
    runner = make_runner(
        recording, CountedSandboxes(), env=shop, wall_clock_s=wall_clock_s, tool_timeout_s=1e6, max_turns=3
    )
    return runner, engine


def leave(shop: StubbornWorkshop) -> float:
    """Leave a schedule whose one trajectory is in `shop`, release it, and see that nothing more is sampled; how long
    leaving took."""

    async def run() -> float:
        ledger = Ledger()
        runner, engine = stubborn_runner(shop, ledger)
        clock = asyncio.get_running_loop().time
        async with Scheduler(runner, ScheduleConfig()) as scheduler:
            scheduler.submit(TASK, group_id="p/a", siblings=[0])
            await asyncio.sleep(5.0)
            asked, recorded, began = len(engine.prompts), len(list(ledger)), clock()
            assert asked == recorded > 0
        took_s = clock() - began
        shop.released.set()
        await asyncio.sleep(1.0)
        assert len(engine.prompts) == asked, "the engine was asked after the run ended"
        assert len(list(ledger)) == recorded
        return took_s

    return run_virtual(run())


@pytest.mark.parametrize("where", ["tool", "grader"])
def test_leaving_does_not_wait_for_one_that_never_ends(where: str) -> None:
    """It is cancelled twice, with ten seconds each, and named."""
    with pytest.warns(RuntimeWarning, match=r"^1 trajectories did not end within 20 s.*: p/a/0; their tools or grader"):
        assert leave(StubbornWorkshop(where=where)) == pytest.approx(20.0)


def test_leaving_cancels_once_more() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert leave(StubbornWorkshop(swallows=1)) == pytest.approx(10.0)


def test_leaving_waits_no_longer_than_it_must() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert leave(StubbornWorkshop(swallows=0)) == pytest.approx(0.0)


def test_one_that_was_let_go_samples_nothing_more() -> None:
    """Its tool comes back when its group was handed out; a completion of then would be in nobody's samples."""
    shop, ledger = StubbornWorkshop(), Ledger()

    async def run() -> list[TrajectoryGroup]:
        runner, engine = stubborn_runner(shop, ledger, wall_clock_s=100.0)
        async with Scheduler(runner, ScheduleConfig(infrastructure_retries=0)) as scheduler:
            scheduler.submit(TASK, group_id="p/a", siblings=[0])
            groups = [group async for group in scheduler]
            shop.released.set()
            await asyncio.sleep(1.0)
            assert len(engine.prompts) == 1
        return groups

    (group,) = run_virtual(run())
    assert group.trajectories[0].stop_reason is StopReason.CANCELLED
    assert check_law([group], ledger) == group.trajectories[0].turns[0].sampled_tokens > 0
