"""Task folders in Harbor's layout as an environment: a shell and an editor in a sandbox, and tests that pay the reward.

A folder of tasks is read whole when the environment is made. What the model sees of a task is instruction.md and the
sandbox that environment/ describes; tests and solution are hidden, and reach no sandbox before grading.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from envs.base import Split
from envs.sandbox.base import Sandbox, SandboxFactory, SandboxSpec, Shell, with_mode
from envs.task_file import TaskFolder, read_task_folder
from envs.task_grading import grade_folder, shell_of
from envs.task_tools import MAX_TIMEOUT_S, TOOLS, edit_file, run_bash
from envs.tools import call_error
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec

SYSTEM = (
    "You work in a Linux sandbox, in the folder {workdir}. Do what the user asks with the tools. "
    "When it is done, say so without calling a tool."
)
HELDOUT_SHARE = 0.25


class TaskFolders:
    """The environment over a folder of task folders; without one, over the tasks that come with the package.

    The splits: a task is held out when the SHA-256 of `task_folder/` and its name lies in the first quarter. Where that
    would leave a split empty, the task with the smallest (or largest) hash goes there. So a task keeps its split when
    others are added, once there are enough of both.

    Args:
        folder: holds one folder for each task.
        sandboxes: where tests that need a clean sandbox get it. Without it only `shared` tests can be run.

    Raises:
        ValueError: the folder or one of its tasks cannot be used; one line says which, where, and what to do.
    """

    name = "task_folder"

    def __init__(self, folder: Path | None = None, *, sandboxes: SandboxFactory | None = None) -> None:
        self.folder = Path(str(files("envs").joinpath("tasks"))) if folder is None else folder
        if not self.folder.is_dir():
            raise ValueError(f"task_folder: {self.folder}: no such folder; name one that holds task folders")
        if (self.folder / "task.toml").exists():
            raise ValueError(f"task_folder: {self.folder} is one task; name the folder that it lies in")
        paths = sorted(path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if not paths:
            raise ValueError(f"task_folder: {self.folder} holds no task; each is a folder with a task.toml")
        self._folders = {path.name: read_task_folder(path) for path in paths}
        self._sandboxes = sandboxes

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return TOOLS

    @property
    def names(self) -> tuple[str, ...]:
        """All tasks of both splits, sorted."""
        return tuple(self._folders)

    def task(self, name: str) -> Task:
        """One task by its name.

        Raises:
            ValueError: there is none.
        """
        if name not in self._folders:
            raise ValueError(f"task_folder: there is no task {name!r} in {self.folder}; tasks: {', '.join(self.names)}")
        folder = self._folders[name]
        return Task(
            task_id=name,
            prompt=folder.instruction,
            files={path: with_mode(file).content for path, file in folder.sandbox.files.items()},
            metadata={
                "sandbox": list(folder.relaxed),
                "grading": folder.grader_mode,
                "name": folder.toml.task.name or name,
                "metadata": json.loads(json.dumps(folder.toml.metadata, default=str)),
            },
            hidden={"tests": folder.tests, "solution": folder.solution},
        )

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """See `Env.tasks`.

        Raises:
            ValueError: the split has fewer tasks.
        """
        names = split_names(self.names)[split]
        if count > len(names):
            raise ValueError(
                f"task_folder: {self.folder} has {len(names)} tasks of the split {split}, not {count}; ask for fewer "
                "(num_tasks), or add tasks"
            )
        random.Random(f"{self.name}/{split}/{seed}").shuffle(names)
        return [self.task(name) for name in names[:count]]

    def opening(self, task: Task) -> list[Message]:
        system = SYSTEM.format(workdir=self._folders[task.task_id].sandbox.workdir)
        return [Message(role="system", content=system), Message(role="user", content=task.prompt)]

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        return self._folders[task.task_id].sandbox

    def session(self, task: Task, sandbox: Sandbox) -> TaskFolderSession:
        return TaskFolderSession(task, self._folders[task.task_id], sandbox, self._sandboxes)

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        """The solution as one bash call, then a last message. It makes no mistakes.

        Raises:
            ValueError: the task has no solution, or one that is more than solve.sh.
        """
        if any(message.role == "tool" for message in messages):
            return Message(role="assistant", content="It is done.")
        solution = task.hidden["solution"]
        if set(solution) != {"solve.sh"}:
            raise ValueError(
                f"task_folder: {task.task_id}: solution/ must hold solve.sh and nothing else to be demonstrated, which "
                "is one bash call with its content"
            )
        toml = self._folders[task.task_id].toml
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in toml.solution.env.items())
        arguments = {"command": exports + solution["solve.sh"].content.decode(), "timeout_s": MAX_TIMEOUT_S}
        return Message(role="assistant", tool_calls=(ToolCall(call_id="call_0", name="bash", arguments=arguments),))


def split_names(names: Sequence[str]) -> dict[Split, list[str]]:
    """The tasks of each split, in the order of their hashes; see `TaskFolders`.

    >>> {split: len(found) for split, found in split_names([str(number) for number in range(1000)]).items()}
    {'train': 761, 'heldout': 239}
    """
    ranked = sorted((hashlib.sha256(f"task_folder/{name}".encode()).digest(), name) for name in names)
    heldout = [name for digest, name in ranked if digest[0] / 256 < HELDOUT_SHARE]
    if len(ranked) > 1:
        heldout = heldout or [ranked[0][1]]
        heldout = heldout[: len(ranked) - 1]
    return {"train": [name for _, name in ranked if name not in set(heldout)], "heldout": heldout}


class TaskFolderSession:
    """One attempt. Its calls run one after the other, in the order in which they were asked for."""

    def __init__(self, task: Task, folder: TaskFolder, sandbox: Sandbox, sandboxes: SandboxFactory | None) -> None:
        self._task = task
        self._folder = folder
        self._sandbox = sandbox
        self._sandboxes = sandboxes
        self._one_at_a_time = asyncio.Lock()
        self._shell: Shell | None = None
        self._ends = time.monotonic() + (folder.toml.agent.timeout_sec or math.inf)
        self.test_output = ""
        """What the tests printed, once they have run; for the author of the task."""

    async def call(self, call: ToolCall) -> ToolResult:
        started = time.perf_counter()
        async with self._one_at_a_time:
            content, is_error = await self._content(call)
        duration_s = time.perf_counter() - started
        return ToolResult(call_id=call.call_id, content=content, is_error=is_error, duration_s=duration_s)

    async def _content(self, call: ToolCall) -> tuple[str, bool]:
        error = call_error(call, TOOLS)
        if error is not None:
            return error, True
        left_s = self._ends - time.monotonic()
        if left_s <= 0:
            return "error: the time for this task is over; say that you are done", True
        if call.name == "edit_file":
            return await edit_file(self._sandbox, self._folder.sandbox.workdir, call.arguments)
        if self._shell is None:
            self._shell = self._sandbox.shell(await shell_of(self._sandbox))
        return await run_bash(self._shell, call.arguments, left_s=left_s)

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        """What the tests say about what is left in the sandbox; the conversation itself is not looked at."""
        grade = await grade_folder(self._folder, self._task.hidden["tests"], self._sandbox, self._sandboxes)
        self.test_output = grade.output
        return grade.terms
