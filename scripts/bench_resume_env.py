"""A task that even a random model sometimes gets right: say something with an even number of characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envs.base import Split
from envs.sandbox.base import Sandbox, SandboxSpec
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec


class EvenLength:
    """Tasks without tools; the reward is 1 for an answer with an even number of characters, else 0."""

    name = "even_length"
    tools: Sequence[ToolSpec] = ()

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{split}-{seed}-{index}", prompt=f"Say something, {index}.") for index in range(count)]

    def opening(self, task: Task) -> list[Message]:
        return [Message(role="user", content=task.prompt)]

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        return SandboxSpec()

    def session(self, task: Task, sandbox: Sandbox) -> EvenLengthSession:
        return EvenLengthSession()

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        return Message(role="assistant", content="ok")


class EvenLengthSession:
    """Grades the last message."""

    async def call(self, call: ToolCall) -> ToolResult:
        return ToolResult(call_id=call.call_id, content="error: there are no tools", is_error=True)

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        last = messages[-1]
        return {"success": float(last.role == "assistant" and len(last.content) % 2 == 0)}
