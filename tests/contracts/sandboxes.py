"""What the tests of the sandbox contract share: one sandbox or several of a back-end, and a look at the machine."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import docker
import pytest

from envs.sandbox.base import Sandbox, SandboxFactory, SandboxSpec
from envs.sandbox.build_server import server_program
from envs.sandbox.cgroup import ROOT
from envs.sandbox.docker import OWNER_LABEL
from envs.sandbox.launch import process_started
from envs.sandbox.open import Backend, open_factory
from envs.sandbox.pool_client import PoolFactory
from envs.types import ExecResult
from tests.requirements import require

T = TypeVar("T")

TIMEOUT_S = 60.0
ISOLATED = [pytest.param("bubblewrap"), pytest.param("docker", marks=pytest.mark.docker)]
ALL = [pytest.param("local"), *ISOLATED]


def with_factory(backend: Backend, use: Callable[[SandboxFactory], Awaitable[T]], *, warm: int = 0) -> T:
    """Run `use` with an open factory, which is closed afterwards."""
    if backend == "docker":
        require("docker")
    elif backend == "bubblewrap":
        require("bwrap")

    async def main() -> T:
        factory = await open_factory(backend, warm=warm)
        try:
            return await use(factory)
        finally:
            await factory.close()

    return asyncio.run(main())


def with_sandbox(backend: Backend, use: Callable[[Sandbox], Awaitable[T]], spec: SandboxSpec | None = None) -> T:
    async def main(factory: SandboxFactory) -> T:
        async with await factory.start(spec or SandboxSpec()) as sandbox:
            return await use(sandbox)

    return with_factory(backend, main)


async def sh(sandbox: Sandbox, script: str, *, timeout_s: float = TIMEOUT_S, stdin: bytes = b"") -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s, stdin=stdin)


def run_sh(backend: Backend, script: str, spec: SandboxSpec | None = None) -> ExecResult:
    """One shell command in a sandbox of its own."""
    return with_sandbox(backend, lambda sandbox: sh(sandbox, script), spec)


async def pool_pid(factory: SandboxFactory) -> int:
    assert isinstance(factory, PoolFactory)
    return (await factory.pool_state())["pid"]


def containers_with(owner: str) -> list[str]:
    """The containers that the Docker daemon has of an owner's mark (`envs.sandbox.launch.own_mark`)."""
    client = docker.from_env()
    try:
        return [found["Id"] for found in client.api.containers(all=True, filters={"label": f"{OWNER_LABEL}={owner}"})]
    finally:
        client.close()


def processes_named(text: str) -> int:
    """How many processes of this machine have `text` in their command line (Docker's too, when it is local)."""
    count = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += text.encode() in place.read_bytes() and int(place.parent.name) != os.getpid()
        except OSError:
            continue
    return count


async def eventually(condition: Callable[[], bool], *, within_s: float = 20.0) -> bool:
    """Whether a condition comes true: the machine may need a moment to start, or for what has been killed."""
    for _ in range(int(within_s / 0.1)):
        if condition():
            return True
        await asyncio.sleep(0.1)
    return False


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def own_pool() -> Iterator[None]:
    """A pool that nobody else on this machine uses: its address follows from the cache folder."""
    program = server_program()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "agentgrad"
        cache.mkdir(mode=0o700)
        (cache / program.name).symlink_to(program)
        with environment_variable("XDG_CACHE_HOME", folder):
            yield


def mark_of(pid: int) -> str:
    return f"{pid}-{process_started(pid)}"


def left_of(marks: Iterable[str], backend: Backend) -> set[str]:
    """What is left of these pools, after the time that killed processes and a daemon may take."""

    def look() -> set[str]:
        groups = {path.name for path in ROOT.glob("*/agentgrad/*") if path.is_dir()}
        found = {name for name in groups for mark in marks if name.startswith(f"{mark}-")}
        return found | {name for mark in marks for name in (containers_with(mark) if backend == "docker" else ())}

    asyncio.run(eventually(lambda: not look()))
    return look()
