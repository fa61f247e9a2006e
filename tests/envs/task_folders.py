"""What the tests of task folders share: writing one, and opening sandboxes of each kind for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from envs.sandbox.base import Sandbox, SandboxFactory
from envs.sandbox.open import Backend, open_factory
from envs.task_folder import TaskFolders, TaskFolderSession
from envs.types import Message, ToolCall, ToolResult
from tests.requirements import require

T = TypeVar("T")

each_backend = pytest.mark.parametrize(
    "backend", [pytest.param("bubblewrap"), pytest.param("docker", marks=pytest.mark.docker)]
)

SEPARATE = """
artifacts = ["answer.txt"]
[verifier]
environment_mode = "separate"
timeout_sec = 20
"""
SHARED = """
[verifier]
environment_mode = "shared"
timeout_sec = 20
"""
TEST = """#!/bin/sh
reward=0
[ -f /app/answer.txt ] && [ "$(cat /app/answer.txt)" = "$(cat /tests/expected.txt)" ] && reward=1
echo "$reward" >/logs/verifier/reward.txt
"""
each_mode = pytest.mark.parametrize("toml", [pytest.param(None, id="separate"), pytest.param(SHARED, id="shared")])

SENTINEL = "sentinel-4be1d0c7"
FILES: Mapping[str, str] = {
    "task.toml": SEPARATE,
    "instruction.md": "Write the word to answer.txt.\n",
    "environment/Dockerfile": "FROM agentgrad-sandbox:1\nCOPY word.txt .\n",
    "environment/word.txt": "harbour\n",
    "tests/test.sh": TEST,
    "tests/expected.txt": f"{SENTINEL}\n",
    "solution/solve.sh": f"echo {SENTINEL} >answer.txt\n",
}
"""A whole task. Its answer is nowhere but in the hidden part."""


def write_task(folder: Path, changes: Mapping[str, str | bytes | None] | None = None, name: str = "one") -> Path:
    """A task below `folder`, with files changed, added, or (None) left out."""
    task = folder / name
    for path, content in {**FILES, **(changes or {})}.items():
        if content is None:
            continue
        place = task / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return task


def with_factory(backend: Backend, use: Callable[[SandboxFactory], Awaitable[T]]) -> T:
    """Run `use` with an open factory, which is closed afterwards."""
    require("docker" if backend == "docker" else "bwrap")

    async def main() -> T:
        factory = await open_factory(backend)
        try:
            return await use(factory)
        finally:
            await factory.close()

    return asyncio.run(main())


class Attempt:
    """One attempt, for tests to work in and to grade."""

    def __init__(self, session: TaskFolderSession, sandbox: Sandbox) -> None:
        self.session = session
        self.sandbox = sandbox

    async def result(self, name: str, **arguments: object) -> ToolResult:
        return await self.session.call(ToolCall(call_id="c", name=name, arguments=arguments))

    async def bash(self, command: str, **arguments: object) -> str:
        return (await self.result("bash", command=command, **arguments)).content

    async def grade(self) -> dict[str, float]:
        return dict(await self.session.grade([Message(role="assistant", content="done")]))


def attempt(backend: Backend, folder: Path, use: Callable[[Attempt], Awaitable[T]], name: str = "one") -> T:
    """Open one task of `folder` in a sandbox, and work in it."""

    async def main(factory: SandboxFactory) -> T:
        env = TaskFolders(folder, sandboxes=factory)
        task = env.task(name)
        async with await factory.start(env.sandbox_spec(task)) as sandbox:
            return await use(Attempt(env.session(task, sandbox), sandbox))

    return with_factory(backend, main)


def task(folder: Path, toml: str | None = None, **changes: str | bytes | None) -> Path:
    """A folder with one task; `toml` None keeps the separate one. In names, __ is a slash and _sh an ending."""
    rows = {name.replace("__", "/").replace("_sh", ".sh"): text for name, text in changes.items()}
    write_task(folder, rows if toml is None else {"task.toml": toml, **rows})
    return folder


def graded_after(backend: Backend, folder: Path, *commands: str, name: str = "one") -> dict[str, float]:
    """The reward terms after some commands of an agent."""

    async def work(one: Attempt) -> dict[str, float]:
        for command in commands:
            await one.bash(command)
        return await one.grade()

    return attempt(backend, folder, work, name)
