"""The clock of a trajectory ends while its request is under way: was it the servers, or did the policy sample long?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from data.types import Completion, SamplingParams
from envs.sandbox.base import SandboxFactory
from rollouts.engine import EngineError, EngineInFront
from rollouts.engine_scripted import ScriptedEngine
from rollouts.engine_server import ServerEngine
from rollouts.server_patience import Patience
from rollouts.types import StopReason
from tests.rollouts.desk import TASK, attempt, in_sandboxes, make_runner, say
from tests.rollouts.stub_fleet import sampling, stand_still, until
from tests.rollouts.stub_server import StubServer

PATIENCE = Patience(health_interval_s=0.05, backoff_s=0.02, recovery_s=60.0, last_look_s=0.5)


async def out_of_time(engine: ServerEngine, is_time: Callable[[], bool]) -> None:
    """A request that is cancelled as soon as `is_time`."""
    work = asyncio.create_task(engine.generate("t/1", [5], sampling()))
    await until(is_time)
    work.cancel()
    await work


def test_a_server_that_stands_still_is_the_engines_fault(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    engine = connect(server, patience=PATIENCE)
    stand_still(server)
    with pytest.raises(EngineError, match=rf"completion t/1 was out of time, and server {server.address} answers"):
        asyncio.run(out_of_time(engine, lambda: server.running == 1))
    asyncio.run(until(lambda: server.running == 0))


def test_a_server_that_stood_still_after_it_had_answered_others_is_the_engines_fault_too(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    engine = connect(server, patience=PATIENCE)

    async def scenario() -> None:
        server.faults.append("hang")
        work = asyncio.create_task(engine.generate("t/1", [5], sampling()))
        await until(lambda: server.running == 1)
        await engine.generate("u/1", [5], sampling())
        stand_still(server)
        await asyncio.sleep(2 * PATIENCE.last_look_s)
        work.cancel()
        await work

    with pytest.raises(EngineError, match="was out of time, and server"):
        asyncio.run(scenario())


def test_waiting_for_a_server_is_the_engines_fault(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    engine = connect(server, patience=PATIENCE)

    async def scenario() -> None:
        server.kill()
        await until(lambda: engine.counts.lost == 1)
        await out_of_time(engine, lambda: engine.load.waiting == 1)

    with pytest.raises(EngineError, match=r"out of time with no server up \(.*no connection"):
        asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["drop", 500])
def test_a_request_that_was_sent_again_is_the_engines_fault(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], fault: Any
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, patience=PATIENCE)
    for server in servers:
        server.faults.extend([fault, "hang"])
    with pytest.raises(EngineError, match=r"out of time after 2 attempts \(.*; .*\)"):
        asyncio.run(out_of_time(engine, lambda: engine.counts.resent == 2))


def test_a_long_completion_of_a_server_that_is_well_is_the_policys_own(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """Though the server had answered nobody since it got the request."""
    server = stub()
    engine = connect(server, patience=Patience(last_look_s=20.0))
    server.is_held = True
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(out_of_time(engine, lambda: server.running == 1))
    assert (engine.counts.lost, engine.counts.resent) == (0, 0)


class Excusing(EngineInFront):
    """Never answers, and says why when it is cancelled."""

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancelled:
            raise EngineError("no server was up") from cancelled
        raise AssertionError


def test_what_the_engine_says_to_the_clock_ends_the_trajectory_without_a_reward() -> None:
    trajectory = attempt(Excusing(ScriptedEngine([say("ok")])), wall_clock_s=2.0)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ENGINE_ERROR, None)
    assert trajectory.error == "no server was up"


def test_what_the_engine_says_to_a_cancellation_from_outside_does_not_hold_it_up() -> None:
    async def run(sandboxes: SandboxFactory) -> None:
        runner = make_runner(Excusing(ScriptedEngine([say("ok")])), sandboxes)
        running = asyncio.create_task(runner.run(TASK, group_id="g", sibling_index=0))
        await asyncio.sleep(0.2)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        in_sandboxes(run)
