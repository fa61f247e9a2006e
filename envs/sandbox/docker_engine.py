"""The Docker daemon behind the SDK's client: one connection, a bounded pool of threads, one kind of error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

import docker
from docker.errors import APIError, DockerException
from docker.utils import kwargs_from_env

from envs.sandbox.base import SandboxError, SandboxUnavailableError

THREADS = 32
REQUEST_S = 60

P = ParamSpec("P")
T = TypeVar("T")


class DockerEngine:
    """The SDK's client and the threads that it blocks; every error of Docker becomes a one-line SandboxError."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="agentgrad-docker")
        self.api: Any = None  # the SDK has no types

    async def connect(self) -> None:
        host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        if not host.startswith(("unix://", "tcp://", "http://")) or os.environ.get("DOCKER_TLS_VERIFY"):
            raise SandboxUnavailableError(f"docker: {host}: only plain unix:// and tcp:// hosts work; set DOCKER_HOST")
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
            raise SandboxError(f"docker: the daemon does not answer: {error}") from error

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def close(self) -> None:
        if self.api is not None:
            await self._in_thread(self.api.close)
        await asyncio.to_thread(self._pool.shutdown)


def _why_unavailable(error: BaseException, host: str) -> str:
    text = f"{error} {error.__cause__} {error.__context__}"
    if "PermissionError" in text or "Permission denied" in text:
        return f"docker: no permission for {host}: add yourself to the group docker, or set DOCKER_HOST"
    return f"docker: no daemon answers at {host}: start it (systemctl start docker), or set DOCKER_HOST"
