"""How long is a tool waited for, and whom does it hold that waits, blocks or is ended?"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from envs.base import Env, TransientToolError
from envs.sandbox.base import Sandbox, SandboxFactory
from envs.sandbox.local import LocalFactory
from envs.types import Task, ToolCall, ToolResult
from rollouts.engine_scripted import ScriptedEngine
from rollouts.summary import summarise
from rollouts.types import StopReason, Trajectory
from tests.rollouts.desk import TASK, Desk, DeskSession, attempt, in_sandboxes, make_runner, observations, say

Answer = Callable[[ToolCall], Awaitable[ToolResult]]


class Answering(Desk):
    """A desk where `answer` does the calls, whatever their tool."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def session(self, task: Task, sandbox: Sandbox) -> AnsweringSession:
        return AnsweringSession(task, sandbox, self._answer)


class AnsweringSession(DeskSession):
    def __init__(self, task: Task, sandbox: Sandbox, answer: Answer) -> None:
        super().__init__(task, sandbox)
        self._answer = answer

    async def call(self, call: ToolCall) -> ToolResult:
        return await self._answer(call)


def attempt_beside_ticks(turns: Sequence[Sequence[int]], env: Env | None = None) -> tuple[Trajectory, int]:
    """One attempt whose tools have 0.5 s; and how often something that ticks each 10 ms ticked in the meantime."""

    async def run(sandboxes: SandboxFactory) -> tuple[Trajectory, int]:
        runner = make_runner(ScriptedEngine(turns), sandboxes, env=env, tool_timeout_s=0.5)
        running = asyncio.create_task(runner.run(TASK, group_id="g", sibling_index=0))
        ticks = 0
        while not running.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return running.result(), ticks

    return in_sandboxes(run)


@pytest.mark.parametrize("tool", ["wait", "block"])
def test_a_tool_that_never_returns_hits_its_deadline_and_holds_nobody(tool: str) -> None:
    trajectory, ticks = attempt_beside_ticks([say("", (tool, "x")), say("ok")])
    (result,) = observations(trajectory)
    assert result.is_error
    assert result.content == f"error: {tool} gave no result within 0.5 s"
    assert trajectory.reward == 1.0
    assert ticks >= 5
    row = summarise([trajectory])
    assert (row["tools/deadlines"], row["tools/errors"], row["tools/failures"]) == (1, 1, 0)


class OwnDeadline(Desk):
    tools = tuple(replace(tool, timeout_s=0.2 if tool.name == "wait" else None) for tool in Desk.tools)


def test_a_tool_s_own_deadline_comes_before_the_run_s() -> None:
    trajectory = attempt(ScriptedEngine([say("", ("wait", "x")), say("ok")]), env=OwnDeadline(), tool_timeout_s=600.0)
    assert [result.content for result in observations(trajectory)] == ["error: wait gave no result within 0.2 s"]
    assert not observations(trajectory)[0].failed, "the command was slow; the tool did what it should"


def test_a_tool_whose_deadline_passed_may_put_its_things_away() -> None:
    put_away: list[str] = []

    async def hang(call: ToolCall) -> ToolResult:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            put_away.append(call.call_id)
        raise AssertionError("the event was never set")

    trajectory = attempt(ScriptedEngine([say("", ("echo", "x")), say("ok")]), env=Answering(hang), tool_timeout_s=0.1)
    assert [result.content for result in observations(trajectory)] == ["error: echo gave no result within 0.1 s"]
    assert put_away == ["call_0_0"]


@pytest.mark.parametrize("given", [None, {"content": "x"}, "x"], ids=["None", "dict", "str"])
def test_what_gives_no_result_has_not_missed_its_deadline(given: Any) -> None:
    """A session that returns something else is a fault of the tool: it is not tried again, and nobody waited."""
    tries: list[str] = []

    async def answer(call: ToolCall) -> Any:
        tries.append(call.call_id)
        return given

    trajectory = attempt(ScriptedEngine([say("", ("echo", "x")), say("ok")]), env=Answering(answer), tool_retries=3)
    assert tries == ["call_0_0"]
    row = summarise([trajectory])
    assert (row["tools/deadlines"], row["tools/errors"], row["tools/failures"], row["tools/retries"]) == (0, 1, 1, 0)


def test_what_gives_no_result_after_its_deadline_has_missed_it() -> None:
    async def swallow(call: ToolCall) -> Any:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    trajectory = attempt(
        ScriptedEngine([say("", ("echo", "x")), say("ok")]), env=Answering(swallow), tool_timeout_s=0.1
    )
    assert [result.content for result in observations(trajectory)] == ["error: echo gave no result within 0.1 s"]


def test_each_retry_waits_twice_as_long() -> None:
    """At least so long, that is: a busy machine is later."""
    tries: list[float] = []

    async def fail(call: ToolCall) -> ToolResult:
        tries.append(time.monotonic())
        raise TransientToolError("busy")

    attempt(
        ScriptedEngine([say("", ("echo", "x")), say("ok")]), env=Answering(fail), tool_retries=3, retry_backoff_s=0.02
    )
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert len(waits) == 3
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.08), strict=True))


def test_several_calls_of_a_turn_run_at_once() -> None:
    """Each returns only when all three are running."""
    running = 0
    all_run = asyncio.Event()

    async def meet(call: ToolCall) -> ToolResult:
        nonlocal running
        running += 1
        if running == 3:
            all_run.set()
        await all_run.wait()
        return ToolResult(call_id=call.call_id, content="met")

    turn = say("", *[("echo", "x")] * 3)
    trajectory = attempt(ScriptedEngine([turn, say("ok")]), env=Answering(meet), tool_timeout_s=20.0)
    assert [result.content for result in observations(trajectory)] == ["met"] * 3


def test_a_blocking_tool_in_a_thread_holds_nobody_trl_7175() -> None:
    """While it sleeps others go on, and its deadline is kept; the thread itself cannot be killed."""

    async def sleep(call: ToolCall) -> ToolResult:
        await asyncio.to_thread(time.sleep, 2.0)
        return ToolResult(call_id=call.call_id, content="awake")

    trajectory, ticks = attempt_beside_ticks([say("", ("echo", "x")), say("ok")], env=Answering(sleep))
    assert [result.content for result in observations(trajectory)] == ["error: echo gave no result within 0.5 s"]
    assert ticks >= 5
    assert trajectory.turns[0].loop_held_s < 0.5


def test_a_tool_that_blocks_the_loop_is_found_out_trl_7175() -> None:
    """Nothing outside of it can stop it; how long it held everybody is measured, wherever in the call it was."""

    async def block(call: ToolCall) -> ToolResult:
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - the fault that is tested
        return ToolResult(call_id=call.call_id, content="awake")

    trajectory = attempt(ScriptedEngine([say("", ("echo", "x")), say("ok")]), env=Answering(block), tool_timeout_s=20.0)
    assert trajectory.turns[0].loop_held_s >= 0.3
    assert summarise([trajectory])["tools/loop_held_s/max"] == trajectory.turns[0].loop_held_s


@pytest.mark.parametrize("other", ["wait", "block", "crash", "echo"])
def test_a_sandbox_that_fails_one_call_leaves_none_of_the_others_running(tmp_path: Path, other: str) -> None:
    """One exception ends one trajectory, and nothing of it goes on."""

    async def run() -> tuple[Trajectory, int]:
        factory = LocalFactory(tmp_path)
        runner = make_runner(ScriptedEngine([say("", (other, "x"), ("break", "x"))]), factory, tool_timeout_s=600.0)
        trajectory = await runner.run(TASK, group_id="g", sibling_index=0)
        left = len(asyncio.all_tasks()) - 1
        await factory.close()
        return trajectory, left

    trajectory, left = asyncio.run(run())
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.SANDBOX_ERROR, None)
    assert trajectory.error == "the sandbox is gone; start a new one"
    assert left == 0
    assert list(tmp_path.iterdir()) == []


def test_cancelled_from_outside_it_leaves_nothing_behind(tmp_path: Path) -> None:
    async def run() -> int:
        factory = LocalFactory(tmp_path)
        asked = asyncio.Event()

        def script(prompt: Sequence[int]) -> list[int]:
            asked.set()
            return say("", ("block", "x"), ("wait", "x"))

        runner = make_runner(ScriptedEngine(script), factory, tool_timeout_s=600.0)
        running = asyncio.create_task(runner.run(TASK, group_id="g", sibling_index=0))
        await asked.wait()
        await asyncio.sleep(0.2)  # by now both tools are waited for
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert os.listdir(tmp_path) == [], "the sandbox went before the cancellation came through"  # noqa: PTH208
        left = len(asyncio.all_tasks()) - 1
        await factory.close()
        return left

    assert asyncio.run(run()) == 0
