"""Is a task sound? Its demonstrator must earn the full reward, and an attempt that does nothing must earn none."""

from __future__ import annotations

import time
from dataclasses import dataclass

from envs.base import Env
from envs.sandbox.base import SandboxFactory, SandboxUnavailableError
from envs.task_folder import TaskFolderSession
from envs.types import Message, Task
from rollouts.reward import count_turns_said, read_reward
from rollouts.synthesize import run_demonstrator

TOLERANCE = 1e-6
MAX_TURNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCheck:
    """What one task gave. Rewards are None where the sandbox that it asks for cannot be had.

    relaxed: what its sandboxes have that the defaults do not give.
    problem: what is wrong with the task, in words; None when it is sound.
    """

    task_id: str
    solution: float | None = None
    empty: float | None = None
    seconds: float
    relaxed: tuple[str, ...]
    problem: str | None = None


async def check_task(env: Env, sandboxes: SandboxFactory, task: Task, *, timeout_s: float) -> TaskCheck:
    """Run the demonstrator, then nothing, each in a sandbox of its own; a call of a tool has `timeout_s` seconds.

    Raises:
        ValueError: the task has no demonstration, or gives no reward that is a finite number.
        SandboxError: a sandbox failed.
    """
    started = time.perf_counter()
    relaxed = tuple(task.metadata.get("sandbox", env.sandbox_spec(task).relaxed))
    try:
        solution, said = await _attempt(env, sandboxes, task, timeout_s=timeout_s, idle=False)
        empty, _ = await _attempt(env, sandboxes, task, timeout_s=timeout_s, idle=True)
    except SandboxUnavailableError as error:
        seconds = time.perf_counter() - started
        return TaskCheck(task_id=task.task_id, seconds=seconds, relaxed=relaxed, problem=f"cannot run here: {error}")
    return TaskCheck(
        task_id=task.task_id,
        solution=solution,
        empty=empty,
        seconds=time.perf_counter() - started,
        relaxed=relaxed,
        problem=_problem(solution, empty, said),
    )


async def _attempt(
    env: Env, sandboxes: SandboxFactory, task: Task, *, timeout_s: float, idle: bool
) -> tuple[float, str]:
    """The reward of one attempt, and what is known about how it came about."""
    async with await sandboxes.start(env.sandbox_spec(task)) as sandbox:
        session = env.session(task, sandbox)
        if idle:
            messages = [*env.opening(task), Message(role="assistant")]
        else:
            messages = await run_demonstrator(env, task, session, seed=0, max_turns=MAX_TURNS, tool_timeout_s=timeout_s)
        grade = await session.grade(messages)
        reward = read_reward(grade, turns=count_turns_said(messages, env.opening(task)))
    if reward.total is None:
        raise ValueError(f"task {task.task_id}: grading gave no reward term; it must give at least one")
    said = [f"terms {reward.terms}"]
    said += [f"the last tool result: {message.content}" for message in messages if message.role == "tool"][-1:]
    if isinstance(session, TaskFolderSession):
        said.append(f"the tests: {session.test_output}")
    return reward.total, "; ".join(" ".join(part.split())[-300:] for part in said)


def _problem(solution: float, empty: float, said: str) -> str | None:
    if abs(solution - 1) > TOLERANCE:
        return f"its solution scores {solution:g}, not 1 ({said})"
    if abs(empty) > TOLERANCE:
        return f"an attempt that does nothing scores {empty:g}, not 0"
    return None
