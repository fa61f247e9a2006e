"""One trajectory's tools, renderer and engine may do anything: it ends, its tokens stay on record, others go on."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from queue import Queue
from typing import Any

import pytest

from data.ledger import Ledger
from data.tool_formats.base import ParsedTurn
from data.types import Source
from envs.base import TransientToolError
from envs.sandbox.base import Sandbox, SandboxError
from envs.types import Task, ToolCall, ToolResult
from rollouts.engine import EngineError, RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.engine_thread import EngineThread
from rollouts.runner import completion_seed
from rollouts.tool_call import ToolTerms, call_tool
from rollouts.types import StopReason, Trajectory
from tests.rollouts.desk import RENDERER, TASK, Desk, DeskSession, attempt, in_sandboxes, make_runner, observations, say


class _Tool(Desk):
    """A desk whose echo does what it is told to."""

    def __init__(self, work: Callable[[], Awaitable[str]]) -> None:
        self._work = work

    def session(self, task: Task, sandbox: Sandbox) -> DeskSession:
        return _ToolSession(task, sandbox, self._work)


class _ToolSession(DeskSession):
    def __init__(self, task: Task, sandbox: Sandbox, work: Callable[[], Awaitable[str]]) -> None:
        super().__init__(task, sandbox)
        self._work = work

    async def call(self, call: ToolCall) -> ToolResult:
        return ToolResult(call_id=call.call_id, content=await self._work())


async def stubborn() -> str:
    """Takes a cancellation for a reason to answer."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return "still here"
    return "never"


def test_a_tool_that_swallows_a_cancellation_does_not_outlive_the_wall_clock() -> None:
    engine = ScriptedEngine([say("", ("echo", "a")), say("ok")])
    trajectory = attempt(engine, env=_Tool(stubborn), wall_clock_s=2.0, tool_timeout_s=30.0)
    assert trajectory.stop_reason is StopReason.WALL_CLOCK
    assert len(engine.prompts) == 1, "nothing is sampled after it"


def test_a_tool_that_swallows_its_deadline_gave_no_result() -> None:
    engine = ScriptedEngine([say("", ("echo", "a")), say("ok")])
    trajectory = attempt(engine, env=_Tool(stubborn), tool_timeout_s=0.2)
    (result,) = observations(trajectory)
    assert (result.is_error, result.content) == (True, "error: echo gave no result within 0.2 s")
    assert trajectory.stop_reason is StopReason.FINAL_ANSWER


async def torn_down() -> str:
    """A sandbox is told to stop, and says that it has failed."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as cancelled:
        raise SandboxError("the connection is closed") from cancelled
    return "never"


async def try_later() -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError as cancelled:
        raise TransientToolError("busy") from cancelled
    return "never"


@pytest.mark.parametrize("work", [torn_down, try_later])
@pytest.mark.parametrize("calls", [1, 2])
def test_what_a_tool_answers_to_the_clock_is_no_failure(work: Callable[[], Awaitable[str]], calls: int) -> None:
    asked = say("", *[("echo", "a")] * calls)
    trajectory = attempt(ScriptedEngine([asked]), env=_Tool(work), wall_clock_s=2.0, tool_timeout_s=30.0)
    assert (trajectory.stop_reason, trajectory.reward, trajectory.error) == (StopReason.WALL_CLOCK, 0.0, None)
    trajectory = attempt(ScriptedEngine([asked, say("ok")]), env=_Tool(work), tool_timeout_s=0.2, tool_retries=0)
    assert [o.content for o in observations(trajectory)] == ["error: echo gave no result within 0.2 s"] * calls
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.FINAL_ANSWER, 1.0)


@pytest.mark.parametrize("work", [stubborn, torn_down, try_later])
@pytest.mark.parametrize("calls", [1, 2])
def test_what_a_tool_answers_to_a_cancellation_from_outside_does_not_hold_it_up(
    work: Callable[[], Awaitable[str]], calls: int
) -> None:
    engine = ScriptedEngine([say("", *[("echo", "a")] * calls), say("ok")])

    async def run(sandboxes: Any) -> None:
        runner = make_runner(engine, sandboxes, env=_Tool(work), tool_timeout_s=30.0)
        running = asyncio.create_task(runner.run(TASK, group_id="g", sibling_index=0))
        await asyncio.sleep(0.5)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        in_sandboxes(run)
    assert len(engine.prompts) <= 1


@pytest.mark.parametrize("failure", [SandboxError("the daemon is gone"), OSError("the daemon is gone")])
def test_a_sandbox_that_cannot_be_closed_does_not_hold_a_cancellation_up(failure: Exception) -> None:
    class Broken:
        async def close(self) -> None:
            raise failure

    class Factory:
        async def start(self, spec: object) -> Broken:
            return Broken()

    async def run() -> None:
        runner = make_runner(ScriptedEngine([say("ok")], delay_s=60.0), Factory())  # type: ignore[arg-type]
        running = asyncio.create_task(runner.run(TASK, group_id="g", sibling_index=0))
        await asyncio.sleep(0.2)
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


class _Verdict(BaseException):
    """What test libraries raise so that nobody catches it."""


async def judge() -> str:
    raise _Verdict("failed")


async def generator_ended() -> str:
    raise GeneratorExit("failed")


@pytest.mark.parametrize(("work", "name"), [(judge, "_Verdict"), (generator_ended, "GeneratorExit")])
@pytest.mark.parametrize("calls", [1, 2])
def test_whatever_a_tool_raises_stays_with_its_trajectory(
    work: Callable[[], Awaitable[str]], name: str, calls: int
) -> None:
    asked = say("", *[("echo", "a")] * calls)
    trajectory = attempt(ScriptedEngine([asked, say("ok")]), env=_Tool(work))
    assert trajectory.stop_reason is StopReason.FINAL_ANSWER
    assert [o.content for o in observations(trajectory)] == [f"error: echo failed: {name}: failed"] * calls


async def long_story() -> str:
    raise RuntimeError("why " * 500)


@pytest.mark.parametrize(("work", "timeout_s"), [(long_story, 5.0), (stubborn, 0.1)])
def test_what_is_said_of_a_failure_is_cut_by_tokens_too(work: Callable[[], Awaitable[str]], timeout_s: float) -> None:
    engine = ScriptedEngine([say("", ("echo", "a")), say("ok")])
    trajectory = attempt(engine, env=_Tool(work), tool_timeout_s=timeout_s, max_observation_tokens=16)
    (result,) = observations(trajectory)
    assert len(RENDERER.encode_text(result.content)) <= 16


class _BadReader:
    """The renderer, with a reader of a user's own that fails."""

    def __getattr__(self, name: str) -> Any:
        return getattr(RENDERER, name)

    def parse(self, token_ids: Sequence[int], **options: Any) -> ParsedTurn:
        raise RuntimeError("a fault of the reader")


def test_a_turn_that_cannot_be_read_keeps_its_tokens_on_record() -> None:
    ledger = Ledger()
    engine = RecordingEngine(ScriptedEngine([say("ok")]), ledger)

    async def run(sandboxes: Any) -> Trajectory:
        runner = make_runner(engine, sandboxes, renderer=_BadReader())  # type: ignore[arg-type]
        return await runner.run(TASK, group_id="g", sibling_index=0)

    trajectory = in_sandboxes(run)
    assert trajectory.stop_reason is StopReason.SANDBOX_ERROR
    sampled = [segment for stream in trajectory.streams for segment in stream if segment.source is Source.MODEL]
    assert [segment.completion_id for segment in sampled] == [completion.completion_id for completion in ledger]
    assert [segment.token_ids for segment in sampled] == [tuple(say("ok"))]


def test_a_logprob_that_is_no_number_is_the_engine_s_failure_and_never_in_the_ledger() -> None:
    ledger = Ledger()
    engine = RecordingEngine(ScriptedEngine([say("ok")], logprobs=math.nan), ledger)
    runner = in_sandboxes(lambda sandboxes: make_runner(engine, sandboxes).run(TASK, group_id="g", sibling_index=0))
    assert runner.stop_reason is StopReason.ENGINE_ERROR
    assert list(ledger) == []


def test_seeds_of_a_run_are_all_different() -> None:
    seeds = {completion_seed(0, f"step-{step}/task-{task}/0/0") for step in range(400) for task in range(300)}
    assert len(seeds) == 120_000
    assert 0 <= min(seeds) <= max(seeds) < 1 << 63


def test_a_job_that_raises_breaks_the_engine_and_hangs_nobody() -> None:
    ends: Queue[EngineError] = Queue()
    thread = EngineThread("test", has_work=lambda: False, step=lambda: None, ended=ends.put)

    def fails() -> None:
        raise RuntimeError("abort failed")

    thread.post(fails)
    assert "broke between two steps (abort failed)" in str(ends.get(timeout=30))
    with pytest.raises(EngineError, match="abort failed"):
        thread.call(lambda: 1)
    thread.stop()


def test_a_result_of_megabytes_is_cut_beside_the_event_loop() -> None:
    loop_thread = threading.get_ident()
    seen: list[tuple[int, int]] = []

    def watched(content: object) -> str:
        seen.append((len(str(content)), threading.get_ident()))
        return "cut"

    async def run() -> None:
        session = DeskSession(TASK, Sandbox)  # type: ignore[arg-type]
        terms = ToolTerms(tools=Desk.tools, timeout_s=5.0, observe=watched)
        for size in (10, 1_000_000):
            call = ToolCall(call_id="c", name="echo", arguments={"text": "x" * size})
            assert (await call_tool(session, call, terms)).result.content == "cut"

    asyncio.run(run())
    assert [(size, where == loop_thread) for size, where in seen] == [(10, True), (1_000_000, False)]
