"""The sandbox contract, run on each back-end: however something ends, nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import docker
import pytest

from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.sandbox.docker import BOOT_LABEL, OWNER_LABEL, DockerLauncher
from envs.sandbox.launch import boot_id, own_mark, process_started
from envs.sandbox.open import Backend, open_factory
from tests.contracts.sandboxes import (
    ALL,
    ISOLATED,
    TIMEOUT_S,
    containers_with,
    eventually,
    left_of,
    mark_of,
    own_pool,
    pool_pid,
    processes_named,
    sh,
    with_factory,
    with_sandbox,
)
from tests.requirements import require

every = pytest.mark.parametrize("backend", ALL)
isolated = pytest.mark.parametrize("backend", ISOLATED)


def new_token(ending: int = 1) -> str:
    """A time to sleep that no other process sleeps; its last digit tells the owner what to do."""
    return f"100.{uuid.uuid4().int % 10**9}{ending}"


# --- the owner goes on ---


@every
def test_sixteen_at_once_leave_nothing_d14_d20(backend: Backend) -> None:
    """D14, D20, D22: no names that collide, no network each; containers, folders, processes and threads all go."""
    threads = threading.active_count()
    nap = new_token()
    script = f"mkdir -p locked/in; chmod 000 locked; sleep {nap} >/dev/null 2>&1 & pwd; sleep 0.2"

    async def one(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec(files={"a": b"1"})) as sandbox:
            assert (await sh(sandbox, script)).exit_code == 0
            assert await sandbox.read_file("a") == b"1"

    async def use(factory: SandboxFactory) -> list[str]:
        await asyncio.gather(*(one(factory) for _ in range(16)))
        await factory.start(SandboxSpec())  # still open when the factory closes
        marks = [] if backend == "local" else [mark_of(await pool_pid(factory))]
        assert backend != "docker" or _networks_of(marks[0]) == {"none"}
        return marks

    with own_pool():
        marks = with_factory(backend, use)
    assert processes_named(nap) == 0
    assert left_of(marks, backend) == set()
    assert threading.active_count() <= threads


def _networks_of(owner: str) -> set[str]:
    """The names of the networks that an owner's containers are in."""
    client = docker.from_env()
    try:
        found = [client.api.inspect_container(name) for name in containers_with(owner)]
        return {network for one in found for network in one["NetworkSettings"]["Networks"]}
    finally:
        client.close()


@isolated
def test_what_is_closed_is_gone_when_close_returns_d22(backend: Backend) -> None:
    """D22: a constant count while it runs, none after; also when the trajectory ends in an exception."""

    async def use(factory: SandboxFactory) -> None:
        mark = mark_of(await pool_pid(factory))
        nap = new_token()

        async def fail() -> None:
            async with await factory.start(SandboxSpec()) as sandbox:
                await sh(sandbox, f"setsid sleep {nap} >/dev/null 2>&1 & echo")
                assert backend != "docker" or len(containers_with(mark)) == 1
                assert await eventually(lambda: processes_named(f"sleep\0{nap}") == 1)
                raise RuntimeError("a fault of the trajectory's")

        for _ in range(3):
            with pytest.raises(RuntimeError, match="the trajectory's"):
                await fail()
            assert backend != "docker" or not containers_with(mark)
            assert processes_named(nap) == 0

    with own_pool():
        with_factory(backend, use)


@isolated
def test_late_commands_hold_no_threads_d04(backend: Backend) -> None:
    """D04: thirty-two that sleep for ever all come back."""

    async def use(factory: SandboxFactory) -> None:
        sandboxes = [await factory.start(SandboxSpec()) for _ in range(4)]
        late = [sandbox.exec(["sleep", "9999"], timeout_s=1) for sandbox in sandboxes for _ in range(8)]
        assert all(result.timed_out for result in await asyncio.gather(*late))

    threads = threading.active_count()
    with_factory(backend, use)
    assert threading.active_count() <= threads


@every
def test_a_cancelled_command_is_killed(backend: Backend) -> None:
    nap = new_token()

    async def use(sandbox: Sandbox) -> None:
        running = asyncio.ensure_future(sandbox.exec(f"(setsid sleep {nap} &); sleep {nap}", timeout_s=TIMEOUT_S))
        assert await eventually(lambda: processes_named(f"sleep\0{nap}") == 2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert processes_named(f"sleep\0{nap}") == 0
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use)


@isolated
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2])
def test_a_cancelled_start_leaves_nothing(backend: Backend, after_s: float) -> None:
    """Also while the pool goes on, which other starts keep open."""

    async def use(factory: SandboxFactory) -> str:
        starting = [asyncio.ensure_future(factory.start(SandboxSpec(files={"a": b"1"}))) for _ in range(4)]
        await asyncio.sleep(after_s)
        for start in starting:
            start.cancel()
        for started in await asyncio.gather(*starting, return_exceptions=True):
            if not isinstance(started, BaseException):
                await started.close()
        return mark_of(await pool_pid(factory))

    with own_pool():
        mark = with_factory(backend, use)
        assert left_of([mark], backend) == set()


# --- the sandbox ends by itself ---


@isolated
def test_a_sandbox_that_is_killed_from_outside(backend: Backend) -> None:
    """That is the sandbox's error, with the reason, for what runs and for what comes later; the next one starts."""
    nap = new_token()

    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as sandbox:
            running = asyncio.ensure_future(sandbox.exec(["sleep", nap], timeout_s=TIMEOUT_S))
            assert await eventually(lambda: processes_named(f"sleep\0{nap}") == 1)
            _kill_first_process(nap)
            with pytest.raises(SandboxError, match=r"ended by itself: (its container|bwrap ended|its process)"):
                await running
            with pytest.raises(SandboxError, match="ended by itself"):
                await sandbox.read_file("a")
        async with await factory.start(SandboxSpec()) as sandbox:
            assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_factory(backend, use)


def _kill_first_process(token: str) -> None:
    """Kill process 1 of the sandbox in which a process sleeps `token`: the parent of its parent."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        if place.read_bytes() == f"sleep\0{token}\0".encode():
            supervisor = _parent(int(place.parent.name))
            os.kill(_parent(supervisor), signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- the owner ends ---


@isolated
@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGKILL", "exception"])
def test_the_owner_ends_d01_d23(backend: Backend, way: str) -> None:
    """D01, D23: four sandboxes, warm ones beside them, processes that ignore signals and leave their session."""
    require("docker" if backend == "docker" else "bwrap")
    token = new_token(ending=7 if way == "exception" else 1)
    command = [sys.executable, "-m", "tests.contracts.owner", backend, "4", token]
    with own_pool(), tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as owner:
            assert owner.stdout is not None
            said, pid = owner.stdout.readline().split()
            assert said == b"running"
            mark = mark_of(int(pid))
            if way != "exception":
                assert processes_named(f"sleep\0{token}") == 8
                owner.send_signal(getattr(signal, way))
        assert asyncio.run(eventually(lambda: processes_named(token) == 0))
        assert left_of([mark], backend) == set()
        assert asyncio.run(eventually(lambda: process_started(int(pid)) is None))
        assert list(Path(folder).iterdir()) == []


@isolated
def test_the_pool_is_killed(backend: Backend) -> None:
    """What is in use goes on and can be closed; what was warm ends; the next start makes a pool that clears up."""

    async def use(factory: SandboxFactory) -> list[str]:
        async with await factory.start(SandboxSpec()) as sandbox:
            pid = await pool_pid(factory)
            marks = [mark_of(pid)]
            os.kill(pid, signal.SIGKILL)
            assert (await sh(sandbox, "echo still here")).stdout == "still here\n"
            async with await factory.start(SandboxSpec()) as other:
                assert (await sh(other, "echo new")).stdout == "new\n"
            assert await pool_pid(factory) != pid
            assert (await sh(sandbox, "echo still here")).stdout == "still here\n"
            return [*marks, mark_of(await pool_pid(factory))]

    with own_pool():
        marks = with_factory(backend, use, warm=2)
        assert left_of(marks, backend) == set()


@pytest.mark.docker
def test_the_reaper_removes_by_exact_label() -> None:
    """Leftovers of an owner that is gone go; a living owner's, another host's and what is only named alike stay."""
    require("docker")
    client = docker.from_env()
    dead, alive, boot = f"{os.getpid()}-1", own_mark(), boot_id()
    labels = {
        "dead": {OWNER_LABEL: dead, BOOT_LABEL: boot},
        "alive": {OWNER_LABEL: alive, BOOT_LABEL: boot},
        "elsewhere": {OWNER_LABEL: dead, BOOT_LABEL: str(uuid.uuid4())},
        "malformed": {OWNER_LABEL: "?", BOOT_LABEL: boot},
        "alike": {f"{OWNER_LABEL}s": dead, BOOT_LABEL: boot},
    }
    names = {kind: f"agentgrad-{uuid.uuid4().hex}" for kind in labels}

    async def reap() -> int:
        launcher = DockerLauncher()
        try:
            return await launcher.reap()
        finally:
            await launcher.close()

    try:
        for kind, its in labels.items():
            client.containers.create("agentgrad-sandbox:1", "true", name=names[kind], labels=its)
        assert asyncio.run(reap()) == 1
        left = {found["Names"][0][1:] for found in client.api.containers(all=True)}
        assert {kind for kind, name in names.items() if name in left} == set(labels) - {"dead"}
    finally:
        for name in names.values():
            for found in client.containers.list(all=True, filters={"name": f"^/{name}$"}):
                found.remove(force=True)
        client.close()


@isolated
def test_two_processes_start_many_at_once_d14(backend: Backend) -> None:
    """D14: no name is used twice; both have the same pool."""
    require("docker" if backend == "docker" else "bwrap")
    program = (
        "import asyncio, sys\n"
        "from envs.sandbox.base import SandboxSpec\n"
        "from envs.sandbox.open import open_factory\n"
        "async def main():\n"
        "    factory = await open_factory(sys.argv[1])\n"
        "    made = await asyncio.gather(*(factory.start(SandboxSpec()) for _ in range(8)))\n"
        "    done = await asyncio.gather(*(one.exec(['echo', 'x'], timeout_s=60) for one in made))\n"
        "    assert all(result.stdout == 'x\\n' for result in done)\n"
        "    print((await factory.pool_state())['pid'], flush=True)\n"
        "    sys.stdin.read()\n"
        "    await factory.close()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, backend]
    owners = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    pids = [owner.stdout.readline() for owner in owners if owner.stdout is not None]
    assert pids[0] == pids[1] != ""
    for owner in owners:
        owner.communicate("")
        assert owner.returncode == 0


def test_opening_twice_shares_one_pool() -> None:
    require("bwrap")

    async def main() -> None:
        one, other = await open_factory("bubblewrap"), await open_factory("bubblewrap")
        assert await pool_pid(one) == await pool_pid(other)
        await one.close()
        async with await other.start(SandboxSpec()) as sandbox:
            assert (await sh(sandbox, "echo x")).stdout == "x\n"
        await other.close()

    asyncio.run(main())
