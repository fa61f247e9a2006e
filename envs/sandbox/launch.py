"""What a back-end does: start one sandbox whose server answers on a socket, end it for certain, and clear up.

This runs in the pool's process (`pool_process.py`), never in the one that trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from envs.sandbox.base import MIB, SandboxError, SandboxLimits, SandboxSpec

START_S = 60.0
"""A sandbox whose server has not answered by then has failed to start."""
PROXY_PORT = 3128
SPARE_PROCESSES = 16
"""What the server and its supervisors may need on top of the limit on processes."""
FOR_PROCESSES_BYTES = 32 * MIB
SHARED_MEMORY_BYTES = 16 * MIB
SERVER = "/.agentgrad/server"
"""Where the server program lies in every sandbox."""


class Launched(Protocol):
    """One running sandbox. Whoever holds `connected` owns it: when the last copy of that socket is closed, it ends."""

    name: str
    """It names the sandbox for ever, on every host."""
    connected: socket.socket
    variables: Mapping[str, str]

    async def end(self) -> None:
        """Return when nothing is left of it. Safe to call twice, and again after an error.

        Raises:
            SandboxError: something is left.
        """
        ...

    async def why_gone(self) -> str: ...


class Launcher(Protocol):
    """One kind of sandbox."""

    name: str

    async def check(self, spec: SandboxSpec) -> None:
        """Whether such a sandbox can be had here; what is slow and needed once, such as its image, is made.

        Raises:
            SandboxUnavailableError: one line says why not, and what helps.
        """
        ...

    async def prepare(self, spec: SandboxSpec) -> None:
        """Make what is slow and needed once, such as its image, before the first `launch` of a spec."""
        ...

    async def launch(self, spec: SandboxSpec) -> Launched:
        """A new sandbox without its files; nothing is left when this fails or is cancelled."""
        ...

    async def reap(self) -> int:
        """Remove what killed processes of earlier pools left behind, and say how much that was."""
        ...

    async def end_foreign(self, name: str) -> None:
        """End a sandbox, by its name, of a pool that was killed; its channel has been closed."""
        ...

    async def close(self) -> None: ...


def folder_bytes(limits: SandboxLimits, folders: int) -> int:
    """How large each of so many writable folders, and /dev/shm beside them, may become.

    They lie in memory, and files alone must never fill it: then the kernel would find nobody to kill for it but the
    server, and a command's doing would look like the sandbox's failure.

    >>> folder_bytes(SandboxLimits(memory_bytes=256 * MIB, disk_bytes=64 * MIB), 2) // MIB
    64
    >>> folder_bytes(SandboxLimits(memory_bytes=64 * MIB, disk_bytes=64 * MIB), 2) // MIB
    8
    """
    for_processes = min(FOR_PROCESSES_BYTES, limits.memory_bytes // 2)
    room = limits.memory_bytes - for_processes - shared_memory_bytes(limits)
    return max(4096, min(limits.disk_bytes, room // max(1, folders)))


def shared_memory_bytes(limits: SandboxLimits) -> int:
    return min(SHARED_MEMORY_BYTES, limits.memory_bytes // 4)


def version_of(image: str) -> tuple[str, ...]:
    """What tells one content of an image from another without reading it: of a path, when what lies there was changed
    and how large it is; of a registry's name, the name."""
    if not image.startswith("/"):
        return (image,)
    place = Path(image)
    found: list[str] = [image]
    for path in (place, *(sorted(place.rglob("*")) if place.is_dir() else ())):
        with contextlib.suppress(OSError):
            status = path.lstat()
            found.append(f"{path} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_size}")
    return tuple(found)


def proxy_variables(spec: SandboxSpec) -> dict[str, str]:
    """What tells programs inside of the way to the network, where the task has one."""
    if spec.network == "none":
        return {}
    address = f"http://127.0.0.1:{PROXY_PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")
    return {**dict.fromkeys(names, address), "no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1"}


async def read_exactly(connected: socket.socket, size: int) -> bytes:
    """`size` bytes of a non-blocking socket; fewer when it ends."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(connected, size - len(data))
        if not part:
            break
        data += part
    return data


async def wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether the process ends in time; it is reaped then. No thread is held meanwhile."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    handle = os.pidfd_open(process.pid)
    loop.add_reader(handle, lambda: ended.done() or ended.set_result(None))
    try:
        async with asyncio.timeout(timeout_s):
            await ended
    except TimeoutError:
        return process.poll() is not None
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    process.wait()
    return True


def process_started(pid: int) -> str | None:
    """When a process of this machine started, in clock ticks since the boot; None when there is no such process.

    With the boot id it names one process for ever: a process id alone is used again.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


def own_mark() -> str:
    """This process for ever, on this boot: its id and when it started.

    >>> own_mark().startswith(f"{os.getpid()}-")
    True
    """
    return f"{os.getpid()}-{process_started(os.getpid())}"


def mark_lives(mark: str) -> bool:
    """Whether the process of a mark still runs. A malformed mark counts as living: nothing of it is touched.

    >>> mark_lives(own_mark()), mark_lives(f"{os.getpid()}-1")
    (True, False)
    """
    pid, dash, started = mark.partition("-")
    if not dash or not pid.isdigit() or not started.isdigit():
        return True
    return process_started(int(pid)) == started


def boot_id() -> str:
    """This boot of this machine, and the namespace in which process ids count: a container has its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def must_answer(hello: bytes, what: str) -> None:
    """See that the first frame of the server has come whole.

    Raises:
        SandboxError: it has not: the server ended first.
    """
    if not hello:
        raise SandboxError(f"{what}: its server ended before it answered")
