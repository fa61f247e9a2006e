"""The Docker daemon behind the SDK's client: one connection, a bounded pool of threads, one kind of error."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

import docker
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env
from urllib3.exceptions import HTTPError

from envs.sandbox.base import SandboxError, SandboxUnavailableError
from envs.sandbox.docker_host import check_host, connect, docker_host, why_unavailable

THREADS = 32
REQUEST_S = 120
MAX_ERROR_BYTES = 4096

P = ParamSpec("P")
T = TypeVar("T")


class DockerEngine:
    """The SDK's client and the threads that it blocks; every error of Docker becomes a one-line SandboxError."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="agentgrad-docker")
        self.api: Any = None  # the SDK has no types
        self._connecting = asyncio.Lock()
        self.is_podman = False
        self.limits_memory = True

    async def connect(self) -> None:
        """Connect, unless that has been done.

        Raises:
            SandboxUnavailableError: no daemon, no permission, or a kind of host that does not work.
        """
        async with self._connecting:
            if self.api is None:
                await self._connect()

    async def _connect(self) -> None:
        await self._in_thread(check_host)
        try:
            api = await self._in_thread(
                docker.APIClient, **kwargs_from_env(), version="auto", timeout=REQUEST_S, max_pool_size=THREADS
            )
            # All that is asked before a container is made, so that none is made without its limits.
            self.is_podman, self.limits_memory = await self._in_thread(_about, api)
            self.api = api
        except (DockerException, OSError, HTTPError) as error:
            raise SandboxUnavailableError(why_unavailable(error, docker_host())) from error

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function of the SDK.

        Raises:
            SandboxError: Docker refused or does not answer; `__cause__` is its error.
        """
        try:
            return await self._in_thread(function, *args, **kwargs)
        except APIError as error:
            raise SandboxError(f"docker: {error.explanation or error}") from error
        except (DockerException, OSError, HTTPError) as error:
            raise SandboxError(f"docker: the daemon at {docker_host()} does not answer: {error}") from error

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def close(self) -> None:
        if self.api is not None:
            await self._in_thread(self.api.close)
        await asyncio.to_thread(self._pool.shutdown)


def _about(api: Any) -> tuple[bool, bool]:
    """Whether this is Podman, and whether it can limit the memory of a container as a whole. Blocking.

    Rootless engines cannot where their user has no control groups of its own, and say so in two ways.
    """
    components = api.version().get("Components") or ()
    if not any("podman" in str(part.get("Name")).lower() for part in components):
        return False, bool(api.info().get("MemoryLimit", True))
    answer = api.get(f"{api.base_url}/v4.0.0/libpod/info", timeout=REQUEST_S)
    return True, "memory" in answer.json()["host"].get("cgroupControllers", ())


def attach(api: Any, container_id: str) -> socket.socket:
    """A connection of its own to a container's stdin and stdout. Blocking.

    The SDK has such a call, but keeps the socket inside a response whose buffer may hold what the container said
    first; this one can be handed to another process.

    Raises:
        OSError: the daemon does not answer, or refuses.
    """
    connected = connect(docker_host(), REQUEST_S)
    try:
        url = f"/v{api._version}/containers/{container_id}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        headers = "Host: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        connected.sendall(f"POST {url} HTTP/1.1\r\n{headers}".encode())
        answer = _read_header(connected)
        status = answer.split(" ", 2)[1] if answer.count(" ") > 1 else ""
        if status not in ("101", "200"):
            said = connected.recv(MAX_ERROR_BYTES).decode("utf-8", "replace") if answer else "no answer"
            raise OSError(f"attaching was refused: {' '.join(said.split()) or answer.splitlines()[0]}")
        connected.settimeout(None)
        return connected
    except BaseException:
        connected.close()
        raise


def _read_header(connected: socket.socket) -> str:
    """An answer's header, and not one byte of what follows it."""
    header = b""
    while not header.endswith(b"\r\n\r\n"):
        byte = connected.recv(1)
        if not byte:
            break
        header += byte
    return header.decode("latin-1")
