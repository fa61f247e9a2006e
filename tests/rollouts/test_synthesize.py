"""Warm-start data: calls run for real, only conversations with the full reward are kept, mistakes are context only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from envs.lookup_calc import LookupCalc
from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec
from rollouts.engine_scripted import ScriptedEngine
from rollouts.synthesize import Synthesis, synthesize
from tests.rollouts.desk import Desk, DeskSession, attempt, in_sandboxes, observations, say


def make(
    env: LookupCalc | Desk, tasks: Sequence[Task], *, seed: int = 0, max_turns: int = 8, tool_timeout_s: float = 5.0
) -> Synthesis:
    return in_sandboxes(
        lambda sandboxes: synthesize(
            env, sandboxes, tasks, seed=seed, max_turns=max_turns, max_concurrent=8, tool_timeout_s=tool_timeout_s
        )
    )


@pytest.fixture(scope="module")
def mixed() -> tuple[LookupCalc, list[Task], Synthesis]:
    """With so many mistakes, some conversations go wrong and some recover."""
    env = LookupCalc(mistake_rate=0.4)
    tasks = env.tasks("train", 40, 3)
    return env, tasks, make(env, tasks)


def test_only_full_rewards_are_kept(mixed: tuple[LookupCalc, list[Task], Synthesis]) -> None:
    env, tasks, result = mixed
    assert 0 < result.dropped < len(tasks)
    assert len(result.demonstrations) == len(tasks) - result.dropped
    by_id = {task.task_id: task for task in tasks}
    kept = [row.task_id for row in result.demonstrations]
    assert kept == [task_id for task_id in by_id if task_id in set(kept)], "in the order of the tasks"

    async def rewards(sandboxes: SandboxFactory) -> list[float]:
        earned = []
        for row in result.demonstrations:
            async with await sandboxes.start(SandboxSpec()) as sandbox:
                session = env.session(by_id[row.task_id], sandbox)
                earned.append(sum((await session.grade(row.messages)).values()))
        return earned

    assert set(in_sandboxes(rewards)) == {1.0}


def test_mistakes_are_context_and_what_repairs_them_is_trained(
    mixed: tuple[LookupCalc, list[Task], Synthesis],
) -> None:
    mistakes = 0
    for row in mixed[2].demonstrations:
        assert row.messages[-1].train
        for message, reply in zip(row.messages, row.messages[1:], strict=False):
            if message.role == "assistant":
                assert reply.role == "tool"
                assert message.train == (not reply.content.startswith("error:"))
                mistakes += not message.train
    assert mistakes > 0


def test_without_mistakes_nothing_is_dropped_and_everything_is_trained() -> None:
    env = LookupCalc(mistake_rate=0.0)
    tasks = env.tasks("train", 15, 0)
    result = make(env, tasks)
    assert result.dropped == 0
    assert [row.task_id for row in result.demonstrations] == [task.task_id for task in tasks]
    for task, row in zip(tasks, result.demonstrations, strict=True):
        assert row.tools == tuple(env.tools)
        assert row.messages[:2] == tuple(env.opening(task))
        assert all(message.train for message in row.messages)
        assert sum(message.role == "tool" for message in row.messages) == task.metadata["calls"]


def test_the_same_seed_gives_the_same_conversations() -> None:
    env = LookupCalc(mistake_rate=0.4)
    tasks = env.tasks("train", 15, 3)
    first = make(env, tasks)
    assert make(env, tasks) == first
    assert make(env, tasks, seed=1).demonstrations != first.demonstrations


def test_a_conversation_that_does_not_end_in_time_is_dropped() -> None:
    env = LookupCalc(mistake_rate=0.0)
    tasks = [task for task in env.tasks("train", 30, 0) if task.metadata["calls"] == 3][:2]
    assert make(env, tasks, max_turns=3).dropped == 2
    assert make(env, tasks, max_turns=4).dropped == 0


class Waiting(Desk):
    """Its demonstrator calls a tool that never returns, once."""

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        if len(messages) > 1:
            return Message(role="assistant", content="ok")
        call = ToolCall(call_id="c", name="wait", arguments={"text": "x"})
        return Message(role="assistant", tool_calls=(call,), train=False)


def test_a_tool_that_never_returns_has_a_deadline() -> None:
    (row,) = make(Waiting(), Desk().tasks("train", 1, 0), tool_timeout_s=0.2).demonstrations
    assert [message.content for message in row.messages if message.role == "tool"] == [
        "error: wait gave no result within 0.2 s"
    ]


class ThreeTerms(Desk):
    """Its full reward has terms that add up to 0.9999999999999999 where they are added one by one."""

    def session(self, task: Task, sandbox: Sandbox) -> DeskSession:
        return ThreeTermsSession(task, sandbox)


class ThreeTermsSession(DeskSession):
    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        return {"right": 0.7, "short": 0.2, "polite": 0.1}


def test_a_full_reward_in_several_terms_is_kept() -> None:
    env = ThreeTerms()
    assert make(env, env.tasks("train", 1, 0)).dropped == 0


def test_a_tool_whose_schema_is_none_is_refused() -> None:
    class Typo(Desk):
        tools = (ToolSpec(name="echo", description="", parameters={"type": "dict"}),)

    with pytest.raises(ValueError, match=r"^tool 'echo': "):
        make(Typo(), Desk().tasks("train", 1, 0))


class FullFactory:
    """A machine that starts one sandbox and no more."""

    name = "full"

    def __init__(self, sandboxes: SandboxFactory) -> None:
        self._sandboxes = sandboxes
        self._started = 0

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self._started += 1
        if self._started > 1:
            raise SandboxError("no space left on this machine; free some")
        return await self._sandboxes.start(spec)

    async def close(self) -> None:
        await self._sandboxes.close()


def test_a_sandbox_that_fails_stops_the_work_with_its_cause() -> None:
    """Data that is silently missing rows would be worse than none."""
    env = Desk()
    with pytest.raises(SandboxError, match="no space left on this machine; free some"):
        in_sandboxes(
            lambda sandboxes: synthesize(
                env,
                FullFactory(sandboxes),
                env.tasks("train", 4, 0),
                seed=0,
                max_turns=2,
                max_concurrent=4,
                tool_timeout_s=5.0,
            )
        )


def test_a_message_tells_when_each_is_done() -> None:
    done: list[int] = []
    tasks = Desk().tasks("train", 3, 0)
    result = in_sandboxes(
        lambda sandboxes: synthesize(
            Desk(),
            sandboxes,
            tasks,
            seed=0,
            max_turns=2,
            max_concurrent=2,
            tool_timeout_s=5.0,
            on_done=lambda: done.append(1),
        )
    )
    assert len(done) == len(result.demonstrations) == 3
    assert result.demonstrations[0].messages[-1] == Message(role="assistant", content="ok")


class Colourful(Waiting):
    """Its tool prints in colour, and a progress bar."""

    def session(self, task: Task, sandbox: Sandbox) -> ColourfulSession:
        return ColourfulSession(task, sandbox)


class ColourfulSession(DeskSession):
    async def call(self, call: ToolCall) -> ToolResult:
        return ToolResult(call_id=call.call_id, content="\x1b[32mPASS\x1b[0m\n 10%\r100%\n")


def test_warm_start_data_and_rollouts_clean_results_by_one_rule_b20() -> None:
    (row,) = make(Colourful(), Desk().tasks("train", 1, 0)).demonstrations
    (shown,) = [message.content for message in row.messages if message.role == "tool"]
    trajectory = attempt(ScriptedEngine([say("", ("wait", "x")), say("ok")]), env=Colourful())
    assert [result.content for result in observations(trajectory)] == [shown] == ["PASS\n100%\n"]


class Crashing(Waiting):
    """Its demonstrator calls a tool that fails by itself."""

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        call = ToolCall(call_id="c", name="crash", arguments={"text": "x"})
        return Message(role="assistant", tool_calls=(call,))


def test_a_tool_that_fails_by_itself_stops_the_work_with_its_cause() -> None:
    """A conversation that shows it would teach that the tool is broken."""
    with pytest.raises(RuntimeError, match=r"(?s)^task train-0-0: a tool failed.*RuntimeError: a fault of the env"):
        make(Crashing(), Desk().tasks("train", 1, 0))


class Forgetful(Waiting):
    """Its session's call has no return statement."""

    def session(self, task: Task, sandbox: Sandbox) -> ForgetfulSession:
        return ForgetfulSession(task, sandbox)


class ForgetfulSession(DeskSession):
    async def call(self, call: ToolCall) -> Any:
        pass


def test_a_session_that_returns_nothing_stops_the_work_with_what_it_must_return() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^task train-0-0: a tool failed.*call must return a ToolResult"):
        make(Forgetful(), Desk().tasks("train", 1, 0))
