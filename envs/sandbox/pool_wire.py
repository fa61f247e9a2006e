"""How a process talks to the pool of its host: JSON messages over a local socket, with open files passed along.

The socket's name is in Linux's abstract namespace, so nothing of it is in any folder and nothing stays behind; the
kernel says which user is at the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.sandbox.base import SandboxLimits, SandboxSpec

MAX_MESSAGE_BYTES = 128 * 1024
MAX_FILES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind:
    """What all sandboxes of one pool have in common."""

    backend: str
    runtime: str | None = None

    @property
    def address(self) -> str:
        """The pool's socket: another one for each user, daemon, runtime, and version of this code."""
        code = hashlib.sha256()
        for path in sorted(Path(__file__).parent.rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                code.update(path.read_bytes())
        host = [os.environ.get(name, "") for name in ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "PATH", "XDG_CACHE_HOME")]
        parts = [str(os.getuid()), self.backend, self.runtime or "", *host, code.hexdigest()]
        return "\0agentgrad-pool-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    made.setblocking(False)
    return made


def peer_is_us(connected: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user in (os.getuid(), 0)


async def send_message(connected: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message, and no other one meanwhile; `OSError` when the other end is gone."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a sandbox's spec of {len(data)} bytes is too large; {MAX_MESSAGE_BYTES} are allowed")
    while True:
        try:
            socket.send_fds(connected, [data], list(files))
            return
        except BlockingIOError:
            await _ready(connected, write=True)


async def receive_message(connected: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its open files; None when the other end is gone."""
    while True:
        try:
            data, files, _, _ = socket.recv_fds(connected, MAX_MESSAGE_BYTES, MAX_FILES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            await _ready(connected, write=False)
            continue
        except ConnectionError:
            return None
        if not data:
            return None
        return json.loads(data), files


async def _ready(connected: socket.socket, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    add(connected, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            remove(connected)


def spec_as_json(spec: SandboxSpec) -> dict[str, Any]:
    """A spec without its files: those travel to the sandbox itself."""
    return dataclasses.asdict(dataclasses.replace(spec, files={}))


def spec_from_json(row: dict[str, Any]) -> SandboxSpec:
    """
    >>> spec = SandboxSpec(image="x", folders=("/logs",))
    >>> spec_from_json(json.loads(json.dumps(spec_as_json(spec)))) == spec
    True
    """
    tuples = {name: tuple(row[name]) for name in ("folders", "allowed_hosts")}
    return SandboxSpec(**{**row, **tuples, "limits": SandboxLimits(**row["limits"])})
