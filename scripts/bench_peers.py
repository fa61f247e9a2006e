"""The peers of the sandbox benchmark: `docker exec` and `containers.run` through Docker's SDK, and SWE-ReX.

They are used as their documents say, with nothing that would hold them back: their containers have no limits.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeVar

from envs.sandbox.base import SandboxError, SandboxUnavailableError
from scripts.bench_timing import Run, Started

BENCH_IMAGE = "agentgrad-bench:1"
BENCH_LABEL = "agentgrad.bench"
THREADS = 16
SERVER_START_S = 60

T = TypeVar("T")


class DockerPeer:
    """Docker's SDK with a pool of threads, since it blocks."""

    def __init__(self, image: str) -> None:
        self.image = image
        self._label = f"{BENCH_LABEL}={secrets.token_hex(8)}"
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="bench-docker")
        self._client: Any = None  # the SDK has no types

    async def connect(self) -> None:
        """Raises: SandboxUnavailableError when there is no daemon or no image."""
        import docker
        from docker.errors import DockerException, ImageNotFound

        try:
            self._client = await self._in_thread(docker.from_env, max_pool_size=THREADS, timeout=120)
            await self._in_thread(self._client.images.get, self.image)
        except ImageNotFound as error:
            build = "sudo bash scripts/build_bench_image.sh" if self.image == BENCH_IMAGE else "docker load"
            raise SandboxUnavailableError(f"docker: there is no image {self.image}: {build}") from error
        except DockerException as error:
            raise SandboxUnavailableError(
                f"docker: no daemon answers: {error}; start it (sudo dockerd), or leave it out: --backends bubblewrap"
            ) from error

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a blocking function of the SDK; its errors become a SandboxError."""
        from docker.errors import DockerException

        try:
            return await self._in_thread(function, *args, **kwargs)
        except DockerException as error:
            raise SandboxError(f"docker: {error}") from error

    async def _in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    async def facts(self) -> dict[str, Any]:
        """Versions and settings of the engine that a reader of the figures wants."""
        info = await self.call(self._client.info)
        names = {"engine": "ServerVersion", "storage": "Driver", "cgroup_version": "CgroupVersion"}
        facts: dict[str, Any] = {name: info.get(key) for name, key in names.items()}
        return facts | {"docker_sdk": version("docker")}

    async def run_container(self, argv: Sequence[str] = ("sleep", "3600"), network: str = "none") -> Any:
        """`containers.run(detach=True)`: returns when it runs."""
        return await self.call(
            self._client.containers.run,
            self.image,
            list(argv),
            detach=True,
            init=True,
            auto_remove=True,
            network_mode=network,
            labels=dict([self._label.split("=")]),
        )

    async def remove(self, container: Any) -> None:
        await self.call(container.remove, force=True, v=True)

    def exec_in(self, container: Any) -> Run:
        """`container.exec_run`, as a function that runs a command."""

        async def run(argv: Sequence[str]) -> str:
            done = await self.call(container.exec_run, list(argv), demux=True)
            if done.exit_code != 0:
                raise SandboxError(f"docker exec: {shlex.join(argv)} ended with {done.exit_code}")
            return (done.output[0] or b"").decode()

        return run

    async def start(self) -> Started:
        """A container without a network, as ours is: it starts faster than one with."""
        container = await self.run_container()
        return Started(run=self.exec_in(container), stop=partial(self.remove, container))

    async def address_of(self, container: Any) -> str:
        await self.call(container.reload)
        return container.attrs["NetworkSettings"]["Networks"]["bridge"]["IPAddress"]

    async def network(self) -> str:
        """`bridge` where a container can be started on one, else `host`."""
        try:
            container = await self.run_container(network="bridge")
        except SandboxError:
            return "host"
        await self.remove(container)
        return "bridge"

    async def close(self) -> None:
        """Remove the containers that are left, as after a start that was cancelled halfway."""
        if self._client is not None:
            for container in await self.call(self._client.containers.list, all=True, filters={"label": self._label}):
                await self.remove(container)
            await self.call(self._client.close)
        await asyncio.to_thread(self._pool.shutdown)


def check_swe_rex() -> None:
    """Raises: ValueError with the command that installs it."""
    # The constraints keep everything else as it is.
    if find_spec("swerex") is None:
        raise ValueError(
            "the peer SWE-ReX is not installed: .venv/bin/pip install -e '.[bench]' -c constraints/bench.txt; "
            "or leave it out: --without-swe-rex"
        )


@asynccontextmanager
async def swe_rex(peer: DockerPeer, container_network: str) -> AsyncIterator[tuple[Any, Any]]:
    """SWE-ReX's server in a container, and its own client for it: (the container, the client).

    On a bridge the client speaks to the container's address, so no proxy of Docker's is in between.
    """
    os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "ERROR")
    from swerex.runtime.remote import RemoteRuntime  # pyright: ignore[reportMissingImports]  # an optional peer

    host_network = container_network == "host"
    host = "127.0.0.1" if host_network else "0.0.0.0"
    port = _free_port() if host_network else 8000
    token = secrets.token_hex(16)
    argv = ["python3", "-m", "swerex.server", "--host", host, "--port", str(port), "--auth-token", token]
    container = await peer.run_container(argv, network=container_network)
    try:
        address = "127.0.0.1" if host_network else await peer.address_of(container)
        runtime = RemoteRuntime(auth_token=token, host=f"http://{address}", port=port, timeout=5.0)
        await _until_alive(peer, container, runtime)
        yield container, runtime
    finally:
        await peer.remove(container)


async def _until_alive(peer: DockerPeer, container: Any, runtime: Any) -> None:
    for _ in range(int(SERVER_START_S / 0.2)):
        if (await runtime.is_alive()).is_alive:
            return
        await asyncio.sleep(0.2)
    logs = (await peer.call(container.logs, tail=3)).decode(errors="replace")
    raise SandboxError(f"SWE-ReX's server does not answer after {SERVER_START_S} s: {logs}")


def execute_of(runtime: Any) -> Run:
    """SWE-ReX's `execute`: a program of its own for each command."""
    from swerex.runtime.abstract import Command  # pyright: ignore[reportMissingImports]  # an optional peer

    async def run(argv: Sequence[str]) -> str:
        return (await runtime.execute(Command(command=list(argv), check=True))).stdout

    return run


async def session_of(runtime: Any) -> Run:
    """SWE-ReX's bash session: `run_in_session`, which raises when the exit code is not 0."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest  # pyright: ignore[reportMissingImports]  # an optional peer

    await runtime.create_session(CreateBashSessionRequest(startup_timeout=10.0))

    async def run(argv: Sequence[str]) -> str:
        return (await runtime.run_in_session(BashAction(command=shlex.join(argv)))).output

    return run


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
