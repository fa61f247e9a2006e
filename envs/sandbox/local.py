"""A folder and plain processes: NO isolation at all, for tests of what stands above the sandbox.

A command can read and change whatever this process can, and reach the network. Never run what a model wrote here. Of
the limits only time, output, one file's size hold. The folder stays when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from envs.sandbox.base import SandboxError, SandboxSpec, SandboxUnavailableError
from envs.sandbox.build_server import server_program
from envs.sandbox.channel import Channel
from envs.sandbox.factory import ServedFactory
from envs.sandbox.served import Started

END_S = 10.0


class _LocalLease:
    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    async def release(self) -> None:
        # The channel has been closed: the server kills what it started, and ends.
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.to_thread(_remove, self._folder)

    async def why_gone(self) -> str:
        return f"its server ended with {await self._process.wait()}"


class LocalFactory(ServedFactory):
    """Starts sandboxes without isolation. Their folders are made in `parent`, or in the system's temporary folder."""

    name = "local"
    confined = True

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__()
        self._parent = parent

    async def _begin(self, spec: SandboxSpec) -> Started:
        if spec.relaxed or spec.image or spec.folders:
            raise SandboxUnavailableError(
                "local: this sandbox has no image, user, folders or network of its own; use docker or bubblewrap"
            )
        program = await asyncio.to_thread(server_program)
        folder = Path(tempfile.mkdtemp(prefix="agentgrad-local-", dir=self._parent))
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                str(program),
                *(str(spec.limits.max_file_bytes), "0", "0", "-1", "0"),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                cwd=folder,
                start_new_session=True,
            )
        lease = _LocalLease(process, folder)
        try:
            channel = await Channel.open(ours, self.name)
        except BaseException:
            ours.close()
            await asyncio.shield(lease.release())
            raise
        variables = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)}
        return Started(channel=channel, lease=lease, variables=variables, server=str(program))


def _remove(folder: Path) -> None:
    for _ in range(3):
        shutil.rmtree(folder, onerror=_unlock)
        if not folder.exists():
            return
    raise SandboxError(f"the working folder {folder} could not be removed; remove it by hand")


def _unlock(_function: object, path: str, _error: object) -> None:
    """Give this process the rights to a folder that a command locked (mode 000); the next try removes it."""
    for place in (Path(path).parent, Path(path)):
        if place.is_dir() and not place.is_symlink():
            with contextlib.suppress(OSError):
                place.chmod(0o700)
