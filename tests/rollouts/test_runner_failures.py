"""What our machinery lost has no reward and names its true cause, and costs one trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from data.types import Completion, SamplingParams
from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.sandbox.local import LocalFactory
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec
from rollouts.config import ScheduleConfig
from rollouts.engine_scripted import ScriptedEngine
from rollouts.record import read_trajectories, write_trajectories
from rollouts.runner import Runner
from rollouts.samples import group_samples
from rollouts.scheduler import sample_groups
from rollouts.summary import summarise
from rollouts.types import StopReason, Trajectory
from tests.by_turn import by_turn
from tests.rollouts.desk import (
    TASK,
    Desk,
    DeskSession,
    attempt,
    in_sandboxes,
    make_runner,
    observations,
    say,
)


def test_an_engine_that_fails() -> None:
    trajectory = attempt(ScriptedEngine([say("", ("echo", "hi")), say("ok")], fail_calls=[1]))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ENGINE_ERROR, None)
    assert trajectory.error == "call 1 fails, as the script says"
    assert len(trajectory.turns) == 1, "what happened before is on record"


class EmptyEngine(ScriptedEngine):
    """It samples nothing."""

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return Completion(
            completion_id=completion_id,
            token_ids=(),
            logprobs=(),
            finish_reason="stop",
            policy="p",
            policy_version=(),
        )


def test_a_completion_without_a_token() -> None:
    trajectory = attempt(EmptyEngine([]))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ENGINE_ERROR, None)
    assert trajectory.error == "completion g/0/0 has no token; an engine must sample at least one"


class LateEngine(ScriptedEngine):
    """Its own time-out is no wall clock of ours."""

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        raise TimeoutError("the server does not answer")


def test_a_time_out_inside_the_engine_is_not_the_policy_s() -> None:
    trajectory = attempt(LateEngine([]))
    assert trajectory.stop_reason.is_infrastructure
    assert trajectory.reward is None
    assert "the server does not answer" in str(trajectory.error)


@pytest.mark.parametrize(
    ("script", "prompt", "cause"),
    [
        ([say("", ("break", "x"))], "Say ok.", "the sandbox is gone; start a new one"),
        ([], "no sandbox", "no sandbox to be had; start one"),
        ([say("ok")], "grading fails", "RuntimeError: the tests could not be run"),
        ([say("ok")], "grading hangs", "no reward within 2 s (limits.wall_clock_s)"),
    ],
    ids=["tool", "start", "grading", "endless grading"],
)
def test_a_sandbox_or_environment_that_fails(script: list[list[int]], prompt: str, cause: str) -> None:
    trajectory = attempt(ScriptedEngine(script), Task(task_id="t", prompt=prompt), wall_clock_s=2.0)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.SANDBOX_ERROR, None)
    assert cause in str(trajectory.error)
    assert trajectory.stop_reason.is_infrastructure


class Trouble(Desk):
    """Its tasks with the id "trouble" go wrong in one way."""

    def __init__(
        self,
        *,
        opening: BaseException | None = None,
        tool: Callable[[], object] | None = None,
        grade: Callable[[], Any] | None = None,
    ) -> None:
        self._opening = opening
        self._tool = tool
        self._grade = grade

    def opening(self, task: Task) -> list[Message]:
        if self._opening is not None and task.task_id == "trouble":
            raise self._opening
        return super().opening(task)

    def session(self, task: Task, sandbox: Sandbox) -> DeskSession:
        if task.task_id != "trouble":
            return super().session(task, sandbox)
        return TroubleSession(task, sandbox, self._tool, self._grade)


class TroubleSession(DeskSession):
    """What `tool` gives is the content of each result, what `grade` gives are the terms; they may raise."""

    def __init__(
        self, task: Task, sandbox: Sandbox, tool: Callable[[], object] | None, grade: Callable[[], Any] | None
    ) -> None:
        super().__init__(task, sandbox)
        self._tool = tool
        self._grade = grade

    async def call(self, call: ToolCall) -> ToolResult:
        if self._tool is None:
            return await super().call(call)
        content = self._tool()
        if isinstance(content, asyncio.Future):
            await content
        return ToolResult(call_id=call.call_id, content=content)  # type: ignore[arg-type]

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        return await super().grade(messages) if self._grade is None else self._grade()


def in_trouble(folder: Path, env: Trouble) -> Trajectory:
    """The trajectory in trouble. Beside it another one ends well, and a file holds both of them whatever they hold."""
    said = iter([say("", ("echo", "hi")), say("ok")])
    tasks = [Task(task_id="trouble", prompt="Say ok."), Task(task_id="good", prompt="Say ok.")]
    trouble_first = ScriptedEngine(lambda prompt: next(said, say("ok")))
    trouble, good = in_sandboxes(
        lambda sandboxes: sample_groups(
            make_runner(trouble_first, sandboxes, env=env),
            tasks,
            num_generations=1,
            prefix="p",
            schedule=ScheduleConfig(max_trajectories=1, infrastructure_retries=0),
        )
    )
    assert (good.trajectories[0].stop_reason, good.trajectories[0].reward) == (StopReason.FINAL_ANSWER, 1.0)
    both = [*trouble.trajectories, *good.trajectories]
    write_trajectories(folder / "t.jsonl", both)
    assert list(read_trajectories(folder / "t.jsonl")) == both
    assert summarise(both)["trajectories"] == 2
    (lost,) = trouble.trajectories
    assert len(group_samples(trouble, by_turn(trouble, [lost.reward]), mask_truncated=True)) == len(lost.streams)
    return trouble.trajectories[0]


def raises(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


def cancelled() -> asyncio.Future[None]:
    """What a tool waits for when a task of its own was cancelled."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


@pytest.mark.parametrize(
    ("env", "cause"),
    [
        (Trouble(opening=RuntimeError("no table")), "RuntimeError: no table"),
        (Trouble(opening=SystemExit(3)), "SystemExit: 3"),
        (Trouble(tool=raises(SandboxError("half a pair: \ud83c"))), "half a pair: \ufffd"),
        (Trouble(grade=raises(SystemExit(3))), "SystemExit: 3"),
        (Trouble(grade=raises(asyncio.CancelledError())), "CancelledError"),
        (Trouble(grade=lambda: None), "TypeError: the environment gave None for reward terms"),
    ],
    ids=[
        "opening",
        "opening exits",
        "surrogate of a sandbox",
        "grading exits",
        "grading cancelled",
        "no terms",
    ],
)
def test_a_fault_of_the_environment_costs_one_trajectory(tmp_path: Path, env: Trouble, cause: str) -> None:
    trajectory = in_trouble(tmp_path, env)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.SANDBOX_ERROR, None)
    assert cause in str(trajectory.error)


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 10**400, 1j])
def test_a_reward_that_is_no_finite_number_is_no_reward(tmp_path: Path, value: Any) -> None:
    trajectory = in_trouble(tmp_path, Trouble(grade=lambda: {"speed": 1.0, "ok": value}))
    assert (trajectory.stop_reason, trajectory.reward, trajectory.reward_terms) == (StopReason.FINAL_ANSWER, None, {})
    assert str(trajectory.error).startswith("the environment gave the reward term ok = ")
    assert len(str(trajectory.error)) < 200


def test_terms_whose_sum_overflows_are_no_reward(tmp_path: Path) -> None:
    trajectory = in_trouble(tmp_path, Trouble(grade=lambda: {"a": 1e308, "b": 1e308}))
    assert (trajectory.reward, trajectory.reward_terms) == (None, {})
    assert trajectory.error == "the environment gave reward terms whose sum is not finite"


def test_terms_are_summed_exactly_and_averaged_where_they_are(tmp_path: Path) -> None:
    trajectory = in_trouble(tmp_path, Trouble(grade=lambda: {"a": 0.7, "b": 0.2, "c": 0.1}))
    assert trajectory.reward == 1.0
    other = attempt(ScriptedEngine([say("ok")]))
    row = summarise([trajectory, other])
    assert {name: row[f"reward/{name}"] for name in ("mean", "a", "ok")} == {"mean": 1.0, "a": 0.7, "ok": 1.0}


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (raises(RuntimeError("half a pair: \ud83c\nand more")), "RuntimeError: half a pair: \ufffd and more"),
        (raises(SystemExit(3)), "SystemExit: it asked the process to exit"),
        (raises(asyncio.CancelledError()), "CancelledError"),
        (cancelled, "CancelledError"),
        (raises(TimeoutError("the database")), "TimeoutError: the database"),
        (raises(ValueError("x" * 5000)), "ValueError: " + "x" * 200 + "…"),
    ],
    ids=["surrogate", "exit", "cancelled", "cancelled task", "a time-out of its own", "long"],
)
def test_a_tool_that_fails_by_itself_is_an_observation(tmp_path: Path, tool: Callable[[], object], told: str) -> None:
    """The model reads one line and may go on; the traceback is for a person."""
    trajectory = in_trouble(tmp_path, Trouble(tool=tool))
    (result,) = observations(trajectory)
    assert (result.content, result.is_error, result.failed) == (f"error: echo failed: {told}", True, True)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.FINAL_ANSWER, 1.0)
    (failure,) = trajectory.turns[0].tool_failures
    assert "Traceback (most recent call last)" in failure
    assert summarise([trajectory])["tools/failures"] == 1


class Unprintable(Exception):
    """Its text fails too."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_is_told_by_its_type(tmp_path: Path) -> None:
    trajectory = in_trouble(tmp_path, Trouble(tool=raises(Unprintable())))
    assert [result.content for result in observations(trajectory)] == ["error: echo failed: Unprintable"]


def test_being_cancelled_from_outside_is_no_failure_of_the_trajectory() -> None:
    async def run(sandboxes: SandboxFactory) -> None:
        sampled = asyncio.Event()

        def script(prompt: Sequence[int]) -> list[int]:
            sampled.set()
            return say("", ("wait", "x"))

        engine = ScriptedEngine(script)
        running = asyncio.create_task(
            make_runner(engine, sandboxes, tool_timeout_s=600.0).run(TASK, group_id="g", sibling_index=0)
        )
        await sampled.wait()
        await asyncio.sleep(0.05)  # by now the tool is waited for
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        in_sandboxes(run)


@pytest.mark.parametrize(
    "env", [Trouble(opening=KeyboardInterrupt()), Trouble(tool=raises(KeyboardInterrupt()))], ids=["opening", "tool"]
)
def test_ctrl_c_ends_the_run(tmp_path: Path, env: Trouble) -> None:
    with pytest.raises(KeyboardInterrupt):
        in_trouble(tmp_path, env)


def test_a_tool_whose_schema_is_none_is_refused_before_anything_is_sampled() -> None:
    class Typo(Desk):
        tools = (ToolSpec(name="echo", description="", parameters={"type": "dict"}),)

    with pytest.raises(ValueError, match=r"^tool 'echo': parameters\['type'\]: 'dict' is not valid "):
        in_sandboxes(lambda sandboxes: refuse(make_runner(ScriptedEngine([]), sandboxes, env=Typo())))


async def refuse(runner: Runner) -> None:
    raise AssertionError(f"{runner} was made")


class StuckFactory:
    """Its sandboxes do not end."""

    name = "stuck"

    def __init__(self, sandboxes: SandboxFactory) -> None:
        self._sandboxes = sandboxes

    async def start(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self._sandboxes.start(spec)
        sandbox.close = asyncio.Event().wait  # type: ignore[method-assign]
        return sandbox

    async def close(self) -> None:
        await self._sandboxes.close()


def test_a_sandbox_that_does_not_end_costs_one_trajectory() -> None:
    async def run() -> Trajectory:
        factory = LocalFactory()
        runner = make_runner(ScriptedEngine([say("ok")]), StuckFactory(factory), wall_clock_s=2.0)
        return await runner.run(TASK, group_id="g", sibling_index=0)

    trajectory = asyncio.run(run())
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.SANDBOX_ERROR, None)
    assert trajectory.cause == "no end of its sandbox within 2 s (limits.wall_clock_s)"
