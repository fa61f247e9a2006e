"""A folder and plain subprocesses: NO isolation at all, for tests of what stands above the sandbox.

A command can read and change whatever this process can, reach the network, and leave processes behind that made a
session of their own. Never run what a model wrote here. No limit but time and output holds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from envs.sandbox.base import SandboxSpec
from envs.sandbox.command import COMMAND_ENVIRONMENT, CommandSandbox, RawResult
from envs.sandbox.factory import CommandFactory
from envs.sandbox.folder import make_folder, remove_folder
from envs.sandbox.process import run_process

# The shell turns a missing program into 127 and one that cannot be executed into 126.
_EXEC = ("/bin/sh", "-c", 'exec "$@"', "sh")


class LocalSandbox(CommandSandbox):
    """One working folder. What a command leaves running in its process group ends with the command."""

    def __init__(self, folder: Path, spec: SandboxSpec) -> None:
        super().__init__("local", spec.limits)
        self._folder = folder

    async def _run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes, max_output_bytes: int) -> RawResult:
        path = os.environ.get("PATH", os.defpath)
        return await run_process(
            [*_EXEC, *argv],
            cwd=self._folder,
            environment={**COMMAND_ENVIRONMENT, "PATH": path, "HOME": str(self._folder)},
            timeout_s=timeout_s,
            stdin=stdin,
            max_output_bytes=max_output_bytes,
        )

    async def _release(self) -> None:
        await asyncio.to_thread(remove_folder, self._folder)


class LocalFactory(CommandFactory):
    """Starts `LocalSandbox`es. Their folders are made in `parent`, or in the system's temporary folder."""

    name = "local"

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__()
        self._parent = parent

    async def _start(self, spec: SandboxSpec) -> LocalSandbox:
        making = asyncio.ensure_future(asyncio.to_thread(_make, self._parent, spec))
        try:
            return LocalSandbox(await asyncio.shield(making), spec)
        except asyncio.CancelledError:
            # The thread goes on, and what it makes must not stay.
            await asyncio.to_thread(remove_folder, await making)
            raise

    async def _release(self) -> None:
        pass


def _make(parent: Path | None, spec: SandboxSpec) -> Path:
    place = parent if parent is not None else Path(tempfile.gettempdir())
    return make_folder(place, spec.files, None, prefix="agentgrad-local-")
