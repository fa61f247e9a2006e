"""The pool with real sandboxes: it ends, its clients end, and starts fail, without harm to what others have."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from envs.sandbox.base import SandboxError, SandboxFactory, SandboxLimits, SandboxSpec
from envs.sandbox.cgroup import Cgroups
from envs.sandbox.launch import process_started
from envs.sandbox.open import Backend
from tests.contracts.sandboxes import ISOLATED, eventually, left_of, mark_of, own_pool, pool_pid, sh, with_factory

isolated = pytest.mark.parametrize("backend", ISOLATED)

# Asks for many sandboxes at once, says so, and never gives one back.
GREEDY = """
import asyncio, sys
from envs.sandbox.base import SandboxSpec
from envs.sandbox.open import open_factory

async def main():
    factory = await open_factory(sys.argv[1], warm=0)
    starting = [asyncio.ensure_future(factory.start(SandboxSpec())) for _ in range(60)]
    await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def _be_greedy_and_killed(backend: Backend) -> None:
    with subprocess.Popen([sys.executable, "-c", GREEDY, backend], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        client.kill()


@isolated
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_pool_is_told_to_end(backend: Backend, number: int) -> None:
    """What is in use goes on and can be closed, what was warm ends, and the next start makes the next pool."""

    async def use(factory: SandboxFactory) -> list[str]:
        async with await factory.start(SandboxSpec()) as sandbox:
            await sandbox.write_file("a", b"1")
            pid = await pool_pid(factory)
            marks = [mark_of(pid)]
            os.kill(pid, number)
            assert await eventually(lambda: process_started(pid) is None)
            assert (await sh(sandbox, "cat a; echo still here")).stdout == "1still here\n"
            async with await factory.start(SandboxSpec()) as other:
                assert (await sh(other, "echo new")).stdout == "new\n"
            assert await sandbox.read_file("a") == b"1"
            return [*marks, mark_of(await pool_pid(factory))]

    with own_pool():
        marks = with_factory(backend, use, warm=2)
        assert left_of(marks, backend) == set()


@isolated
def test_the_pool_is_told_to_end_while_many_start(backend: Backend) -> None:
    """The next pool starts what this one did not."""

    async def use(factory: SandboxFactory) -> list[str]:
        pid = await pool_pid(factory)
        marks = [mark_of(pid)]
        starting = [asyncio.ensure_future(factory.start(SandboxSpec())) for _ in range(24)]
        await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pid, signal.SIGTERM)
        sandboxes = await asyncio.gather(*starting)
        for done in await asyncio.gather(*(sh(sandbox, "echo x") for sandbox in sandboxes)):
            assert done.stdout == "x\n"
        assert await eventually(lambda: process_started(pid) is None)
        return [*marks, mark_of(await pool_pid(factory))]

    with own_pool():
        marks = with_factory(backend, use)
        assert left_of(marks, backend) == set()


@isolated
def test_a_client_is_killed_while_its_starts_wait(backend: Backend) -> None:
    """Nothing of it is left while the pool goes on for others, who have what they had."""

    async def use(factory: SandboxFactory) -> str:
        mark = mark_of(await pool_pid(factory))
        async with await factory.start(SandboxSpec()) as sandbox:
            await asyncio.to_thread(_be_greedy_and_killed, backend)
            async with await factory.start(SandboxSpec()) as other:
                assert (await sh(other, "echo x")).stdout == "x\n"
            assert (await sh(sandbox, "echo x")).stdout == "x\n"
        assert mark_of(await pool_pid(factory)) == mark
        assert await asyncio.to_thread(left_of, [mark], backend) == set()
        return mark

    with own_pool():
        mark = with_factory(backend, use)
        assert left_of([mark], backend) == set()


@isolated
def test_a_start_that_the_kernel_refuses(backend: Backend) -> None:
    """That is a SandboxError, for each that waits, and the next start works."""

    async def use(factory: SandboxFactory) -> None:
        impossible = SandboxSpec(limits=SandboxLimits(max_processes=10**9))
        failed = await asyncio.gather(*(factory.start(impossible) for _ in range(20)), return_exceptions=True)
        assert all(isinstance(error, SandboxError) for error in failed)
        assert all(str(error).startswith(f"{backend}: ") for error in failed)
        async with await factory.start(SandboxSpec()) as sandbox:
            assert (await sh(sandbox, "echo x")).stdout == "x\n"

    if backend == "bubblewrap" and Cgroups.find() is None:
        pytest.skip("nothing is refused where no control groups can be made")
    with own_pool():
        with_factory(backend, use, warm=2)
