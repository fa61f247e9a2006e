"""Warm-start conversations: a demonstrator works on tasks, its calls run for real, and only conversations that earn the
full reward are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.demonstrations import Demonstration
from envs.base import Env, Session
from envs.sandbox.base import SandboxFactory
from envs.tools import check_tools
from envs.types import Message, Task
from rollouts.reward import count_turns_said, read_reward
from rollouts.tool_call import ToolTerms, call_tools
from rollouts.types import is_success


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """What came out: conversations to learn from, and how many earned too little and were dropped."""

    demonstrations: list[Demonstration]
    dropped: int


async def synthesize(
    env: Env,
    sandboxes: SandboxFactory,
    tasks: Sequence[Task],
    *,
    seed: int,
    max_turns: int,
    max_concurrent: int,
    tool_timeout_s: float,
    on_done: Callable[[], None] = lambda: None,
) -> Synthesis:
    """One conversation for each task, in the order of the tasks.

    Raises:
        ValueError: a tool's schema is none, or a reward is no finite number.
        SandboxError: a sandbox failed; data that is silently missing rows would be worse than none.
    """
    check_tools(env.tools)
    places = asyncio.Semaphore(max_concurrent)

    async def attempt(task: Task) -> Demonstration | None:
        async with places, await sandboxes.start(env.sandbox_spec(task)) as sandbox:
            session = env.session(task, sandbox)
            messages = await run_demonstrator(
                env, task, session, seed=seed, max_turns=max_turns, tool_timeout_s=tool_timeout_s
            )
            grade = await session.grade(messages)
            reward = read_reward(grade, turns=count_turns_said(messages, env.opening(task))).total
        on_done()
        if reward is None or not is_success(reward):
            return None
        return Demonstration(task_id=task.task_id, messages=tuple(messages), tools=tuple(env.tools))

    try:
        async with asyncio.TaskGroup() as running:
            attempts = [running.create_task(attempt(task)) for task in tasks]
    except ExceptionGroup as failures:
        # The first failure ended the other attempts; it is the one that says what went wrong.
        raise failures.exceptions[0] from None
    kept = [done for one in attempts if (done := one.result()) is not None]
    return Synthesis(demonstrations=kept, dropped=len(tasks) - len(kept))


async def run_demonstrator(
    env: Env, task: Task, session: Session, *, seed: int, max_turns: int, tool_timeout_s: float
) -> list[Message]:
    """The conversation of one demonstration, from its opening on; its calls are run for real.

    Raises:
        RuntimeError: a tool failed by itself, which says nothing about the demonstrator.
    """
    messages = env.opening(task)
    terms = ToolTerms(tools=env.tools, timeout_s=tool_timeout_s)
    for _ in range(max_turns):
        message = env.demonstrate(task, messages, seed)
        messages.append(message)
        if not message.tool_calls:
            break
        outcomes = await call_tools(session, message.tool_calls, terms)
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            raise RuntimeError(f"task {task.task_id}: a tool failed, whatever the call was:\n{failures[0]}")
        for outcome in outcomes:
            messages.append(Message(role="tool", content=outcome.result.content, call_id=outcome.result.call_id))
    return messages
