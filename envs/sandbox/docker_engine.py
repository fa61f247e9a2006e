"""The Docker daemon behind the SDK's client: one connection, a bounded pool of threads, one kind of error."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env

from envs.sandbox.base import SandboxError, SandboxUnavailableError

THREADS = 32
REQUEST_S = 120
DEFAULT_HOST = "unix:///var/run/docker.sock"

P = ParamSpec("P")
T = TypeVar("T")


def docker_host() -> str:
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


class DockerEngine:
    """The SDK's client and the threads that it blocks; every error of Docker becomes a one-line SandboxError."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="agentgrad-docker")
        self.api: Any = None  # the SDK has no types

    async def connect(self) -> None:
        """Connect, unless that has been done.

        Raises:
            SandboxUnavailableError: no daemon, no permission, or a kind of host that does not work.
        """
        if self.api is not None:
            return
        host = docker_host()
        if not host.startswith(("unix://", "tcp://", "http://")) or os.environ.get("DOCKER_TLS_VERIFY"):
            raise SandboxUnavailableError(
                f"docker: {host}: only plain unix:// and tcp:// hosts work; forward another one (ssh -NL "
                "/tmp/docker.sock:/var/run/docker.sock HOST) and set DOCKER_HOST=unix:///tmp/docker.sock"
            )
        try:
            self.api = await self._in_thread(
                docker.APIClient, **kwargs_from_env(), version="auto", timeout=REQUEST_S, max_pool_size=THREADS
            )
        except (DockerException, OSError) as error:
            raise SandboxUnavailableError(_why_unavailable(error, host)) from error

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function of the SDK.

        Raises:
            SandboxError: Docker refused or does not answer; `__cause__` is its error.
        """
        try:
            return await self._in_thread(function, *args, **kwargs)
        except APIError as error:
            raise SandboxError(f"docker: {error.explanation or error}") from error
        except (DockerException, OSError) as error:
            raise SandboxError(f"docker: the daemon at {docker_host()} does not answer: {error}") from error

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def close(self) -> None:
        if self.api is not None:
            await self._in_thread(self.api.close)
        await asyncio.to_thread(self._pool.shutdown)


def attach(api: Any, container_id: str) -> socket.socket:
    """A connection of its own to a container's stdin and stdout. Blocking.

    The SDK has such a call, but keeps the socket inside a response whose buffer may hold what the container said
    first; this one can be handed to another process.

    Raises:
        OSError: the daemon does not answer, or refuses.
    """
    connected = _connect(docker_host())
    try:
        url = f"/v{api._version}/containers/{container_id}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        headers = "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        connected.sendall(f"POST {url} HTTP/1.1\r\n{headers}".encode())
        answer = _read_header(connected)
        status = answer.split(" ", 2)[1] if answer.count(" ") > 1 else ""
        if status not in ("101", "200"):
            raise OSError(f"attaching was refused: {answer.splitlines()[0] if answer else 'no answer'}")
        connected.settimeout(None)
        return connected
    except BaseException:
        connected.close()
        raise


def _connect(host: str) -> socket.socket:
    if host.startswith("unix://"):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(REQUEST_S)
        try:
            connected.connect(host.removeprefix("unix://"))
        except BaseException:
            connected.close()
            raise
        return connected
    parts = urlsplit(host)
    connected = socket.create_connection((parts.hostname or "localhost", parts.port or 2375), timeout=REQUEST_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connected


def _read_header(connected: socket.socket) -> str:
    """An answer's header, and not one byte of what follows it."""
    header = b""
    while not header.endswith(b"\r\n\r\n"):
        byte = connected.recv(1)
        if not byte:
            break
        header += byte
    return header.decode("latin-1")


def unwrapper() -> Callable[[bytes], list[bytes]]:
    """Takes Docker's framing off an attached stream, and keeps what was written to stdout.

    Each piece has a header of 8 bytes: the stream's number (1 stdout, 2 stderr), three zeros, the length (big-endian),
    as the Docker Engine API describes under ContainerAttach.

    >>> unwrap = unwrapper()
    >>> unwrap(b"\\x01\\0\\0\\0\\0\\0\\0\\x03ab"), unwrap(b"c\\x02\\0")
    ([b'ab'], [b'c'])
    """
    header = b""
    left, kept = 0, False

    def unwrap(data: bytes) -> list[bytes]:
        nonlocal header, left, kept
        parts: list[bytes] = []
        while data:
            if left == 0:
                wanted = 8 - len(header)
                header, data = header + data[:wanted], data[wanted:]
                if len(header) < 8:
                    break
                left, kept = int.from_bytes(header[4:], "big"), header[0] == 1
                header = b""
                continue
            part, data = data[:left], data[left:]
            left -= len(part)
            if kept:
                parts.append(part)
        return parts

    return unwrap


def _why_unavailable(error: BaseException, host: str) -> str:
    text = f"{error} {error.__cause__} {error.__context__}"
    if "PermissionError" in text or "Permission denied" in text:
        return f"docker: no permission for {host}: add yourself to the group docker, or set DOCKER_HOST"
    return f"docker: no daemon answers at {host}: start it (systemctl start docker), or set DOCKER_HOST"
