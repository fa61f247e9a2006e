"""The contract of an environment: it holds tasks, gives tools to the model, and pays the reward.

An `Env` decides, a `Sandbox` executes, a tool is what the model sees. One `Session` is one attempt at one
task; it lives as long as the trajectory that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from envs.sandbox.base import Sandbox, SandboxSpec
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec

Split = Literal["train", "heldout"]


class TransientToolError(RuntimeError):
    """A tool could not do its work this time, and has done none of it: a rate limit, a connection that was reset.

    The same call may be made again. It is, a few times and ever later; the model is told only when none of them worked.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What a finished conversation earned, where an environment also pays for single turns.

    terms: reward terms of the outcome, by name, as `Session.grade` may give them alone.
    turn_rewards: by index of the turn at whose end it was earned; finite numbers that the environment has weighted.
        Turn 0 is the first assistant message after the opening, turn 1 the second. A turn that is not named earned 0.

    The reward of the trajectory is the sum of both. Three turns, the second of which found what the third then used:

        Grade(terms={"success": 1.0}, turn_rewards={1: 0.5})        reward 1.5, of the turns (0.0, 0.5, 0.0)
    """

    terms: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[int, float] = field(default_factory=dict)


class Session(Protocol):
    """One attempt at one task.

    All attempts share one thread, so a session must not block it: work that takes long and cannot be awaited goes
    through `asyncio.to_thread`. While it blocks, no other attempt goes on, and no deadline is kept; nothing outside of
    it can change that, so how long a tool held the thread is measured, and shown as `tools/loop_held_s/max`. A thread
    cannot be killed: one whose deadline has passed goes on unseen until its work ends, so give that work a time-out of
    its own. What must be killable runs in the sandbox.
    """

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one tool call. Whatever the call got wrong comes back as an error result that says how to
        recover. The calls of one turn run at the same time. When their deadline passes they are cancelled.

        Raises:
            TransientToolError: it may be tried again.
            SandboxError: the sandbox failed; the trajectory ends as an infrastructure failure.
            Exception: any other is a fault of this tool, and is told to the model in one line; too many of them in a
                row end the trajectory.
        """
        ...

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float] | Grade:
        """The reward terms of the finished conversation, by name: finite numbers that the environment has weighted.
        The reward is their sum. An environment that also pays for single turns gives a `Grade`.
        """
        ...


class Env(Protocol):
    """A family of tasks with the same tools."""

    name: str

    @property
    def tools(self) -> Sequence[ToolSpec]: ...

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """`count` different tasks; the same arguments give the same tasks, and the splits share none."""
        ...

    def opening(self, task: Task) -> list[Message]:
        """The messages that the conversation starts with."""
        ...

    def sandbox_spec(self, task: Task) -> SandboxSpec: ...

    def session(self, task: Task, sandbox: Sandbox) -> Session: ...

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        """The next assistant message of a scripted demonstrator, for warm-start data.

        Its calls are run for real and only conversations that earn the full reward are kept, so it may make
        mistakes; a mistake is marked `train=False`.
        """
        ...
