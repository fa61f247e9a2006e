"""What the isolated back-ends keep in: the network, the machine's files and secrets, rights, limits, leftovers."""

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

import pytest

from envs.sandbox.base import Sandbox, SandboxFactory, SandboxLimits, SandboxSpec
from envs.sandbox.bubblewrap import BubblewrapFactory
from envs.sandbox.docker import DockerFactory
from envs.sandbox.open import Backend
from tests.contracts.sandboxes import (
    ALL,
    ISOLATED,
    TIMEOUT_S,
    containers_of,
    environment_variable,
    eventually,
    processes_named,
    run_sh,
    sh,
    with_factory,
    with_sandbox,
)
from tests.requirements import require

isolated = pytest.mark.parametrize("backend", ISOLATED)
MIB = 1024 * 1024

# Whatever can open a connection: busybox's nc, or the machine's bash.
CONNECT = "if command -v nc; then nc -w 2 {host} {port} </dev/null; else bash -c 'exec 3<>/dev/tcp/{host}/{port}'; fi"


@pytest.mark.parametrize("backend", ALL)
def test_there_is_no_network_d10(backend: Backend) -> None:
    """D10: no route, no way to this machine, to the metadata address, to the internet; no names are resolved.

    The local back-end shows that the attempt itself works.
    """
    reached: list[str] = []

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(backend)
        writer.close()

    async def use(sandbox: Sandbox) -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            done = await sh(sandbox, CONNECT.format(host="127.0.0.1", port=port))
        assert (done.exit_code == 0) == (backend == "local")
        if backend == "local":
            return
        for host in ("169.254.169.254", "1.1.1.1", "example.com"):
            failed = await sh(sandbox, CONNECT.format(host=host, port=80), timeout_s=20)
            assert failed.exit_code not in (0, 124, 127)
        assert len((await sh(sandbox, "cat /proc/net/route")).stdout.splitlines()) <= 1  # the heading

    with_sandbox(backend, use)
    assert reached == (["local"] if backend == "local" else [])


@isolated
def test_the_machine_is_not_seen_d25(backend: Backend) -> None:
    """D25: no secret of this process, no file outside, no process; nothing but the working folders can be written."""
    secret = uuid.uuid4().hex
    halves = f"{secret[:16]}''{secret[16:]}"  # so that the search does not find itself

    async def use(sandbox: Sandbox) -> None:
        places = "/proc/[0-9]*/environ /proc/[0-9]*/cmdline ./*"
        # Collected first: a grep beside it would be found by its own argument.
        assert (await sh(sandbox, f"cat {places} >/tmp/seen 2>/dev/null; grep -c {halves} /tmp/seen")).stdout == "0\n"
        assert (await sh(sandbox, f"cat {file.name}")).exit_code != 0
        assert (await sh(sandbox, "cat /etc/shadow /etc/machine-id; ls -A /root /home /mnt /srv")).stdout == ""
        processes = (await sh(sandbox, "cat /proc/[0-9]*/comm")).stdout.split()
        assert set(processes) <= {"bwrap", "docker-init", "sleep", "sh", "cat"}
        for place in ("/", "/usr", "/etc", "/bin", "/dev", "/proc/sys/kernel"):
            assert (await sh(sandbox, f"touch {place}/new")).exit_code != 0

    with (
        tempfile.NamedTemporaryFile("w", suffix="-secret") as file,
        environment_variable("AGENTGRAD_TEST_KEY", secret),
    ):
        file.write(secret)
        file.flush()
        with_sandbox(backend, use)


@isolated
def test_commands_have_no_rights(backend: Backend) -> None:
    done = run_sh(backend, "id -u; id -g; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status")
    zero = "0" * 16
    assert done.stdout.split() == ["65534", "65534", "CapEff:", zero, "CapBnd:", zero, "NoNewPrivs:", "1"]
    assert run_sh(backend, "mount -t tmpfs x /work || unshare -Ur id").exit_code != 0


@isolated
def test_processes_are_limited(backend: Backend) -> None:
    """Also: what a command left running cannot keep later commands from starting."""
    many = "i=0; while [ $i -lt 200 ]; do sleep 100 & i=$((i+1)); done; echo all"

    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, many)
        assert done.exit_code != 0
        assert "all" not in done.stdout
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(max_processes=20)))


@isolated
def test_a_fork_bomb_ends_d08(backend: Backend) -> None:
    """D08: it ends with its time limit, the sandbox stays usable, and others do not notice."""

    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as bombed, await factory.start(SandboxSpec()) as other:
            bomb = asyncio.ensure_future(sh(bombed, "f() { f | f & }; f; sleep 100", timeout_s=2))
            await asyncio.sleep(0.5)
            assert (await sh(other, "sh -c 'echo fine'")).stdout == "fine\n"
            done = await bomb
            assert done.timed_out or done.exit_code != 0
            assert (await sh(bombed, "echo again")).stdout == "again\n"

    with_factory(backend, use)


@isolated
def test_the_size_of_files_is_limited_d09(backend: Backend) -> None:
    """D09, in part: one file, and /tmp as a whole. The working folder as a whole is bounded in Docker only."""

    async def use(sandbox: Sandbox) -> None:
        for name in ("big", "/tmp/big"):
            done = await sh(
                sandbox, f"dd if=/dev/zero of={name} bs=65536 count=80; code=$?; wc -c < {name}; exit $code"
            )
            assert done.exit_code != 0
            assert int(done.stdout) <= 2 * MIB
        many = "for i in 1 2 3 4 5 6; do dd if=/dev/zero of={}/$i bs=65536 count=20 || exit 1; done"
        assert (await sh(sandbox, f"rm /tmp/big; {many.format('/tmp')}")).exit_code == 1
        full = await sh(sandbox, f"rm big; {many.format('.')}")
        assert full.exit_code == (1 if backend == "docker" else 0)

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(max_file_bytes=2 * MIB)))


@isolated
def test_memory_is_limited(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await sandbox.exec(["tail", "/dev/zero"], timeout_s=TIMEOUT_S)
        assert done.exit_code != 0
        assert not done.timed_out
        assert done.oom_killed == (backend == "docker")
        killed = await sh(sandbox, "kill -9 $$")
        assert (killed.exit_code, killed.oom_killed) == (137, False)

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(memory_bytes=64 * MIB)))


@isolated
def test_killing_everything_hurts_only_the_command(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sh(sandbox, "kill -9 -1; kill -9 1")
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use)


@isolated
def test_orphans_are_reaped_d06(backend: Backend) -> None:
    """D06: processes that nobody waits for do not pile up as zombies."""

    async def use(sandbox: Sandbox) -> None:
        for _ in range(3):
            assert (await sh(sandbox, "i=0; while [ $i -lt 40 ]; do (true &); i=$((i+1)); done")).exit_code == 0
        await asyncio.sleep(0.5)
        assert (await sh(sandbox, "cat /proc/[0-9]*/stat | grep -c ') Z '")).stdout == "0\n"

    with_sandbox(backend, use)


@isolated
def test_a_locked_file_is_missing(backend: Backend) -> None:
    """A file that its own command made unreadable is the command's fault, not the sandbox's."""

    async def use(sandbox: Sandbox) -> None:
        await sh(sandbox, "echo x > a; chmod 000 a")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("a")
        with pytest.raises(OSError, match="cannot be written"):
            await sandbox.write_file("a", b"x")

    with_sandbox(backend, use)


@pytest.mark.parametrize("backend", ALL)
def test_sixteen_at_once_leave_nothing_d14_d20(backend: Backend) -> None:
    """D14, D20, D22: no names that collide, no network each; containers, folders, processes and threads all go."""
    threads = threading.active_count()
    nap = f"100.{uuid.uuid4().int % 10**9}"
    script = f"mkdir -p locked/in; chmod 000 locked; sleep {nap} >/dev/null 2>&1 & pwd; sleep 0.2"
    folders: list[Path] = []

    async def one(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec(files={"a": b"1"})) as sandbox:
            folder = (await sh(sandbox, script)).stdout.strip()
            folders.append(Path(folder) if factory.name == "local" else Path("/nowhere"))
            assert await sandbox.read_file("a") == b"1"

    async def use(factory: SandboxFactory) -> SandboxFactory:
        await asyncio.gather(*(one(factory) for _ in range(16)))
        await factory.start(SandboxSpec())  # still open when the factory closes
        return factory

    factory = with_factory(backend, use)
    if isinstance(factory, BubblewrapFactory):
        folders.append(factory.folder)
    assert not any(folder.exists() for folder in folders)
    assert backend != "docker" or containers_of(factory) == 0
    assert asyncio.run(eventually(lambda: processes_named(nap) == 0))
    assert threading.active_count() <= threads


@isolated
def test_late_commands_hold_no_threads_d04(backend: Backend) -> None:
    """D04: eight that sleep for ever all come back."""

    async def use(factory: SandboxFactory) -> None:
        sandboxes = [await factory.start(SandboxSpec()) for _ in range(8)]
        done = await asyncio.gather(*(sandbox.exec(["sleep", "9999"], timeout_s=1) for sandbox in sandboxes))
        assert all(result.timed_out for result in done)

    threads = threading.active_count()
    with_factory(backend, use)
    assert threading.active_count() <= threads


@pytest.mark.parametrize("backend", ALL)
def test_a_cancelled_command_is_killed(backend: Backend) -> None:
    nap = f"100.{uuid.uuid4().int % 10**9}"

    async def use(sandbox: Sandbox) -> None:
        running = asyncio.ensure_future(sandbox.exec(["sleep", nap], timeout_s=TIMEOUT_S))
        assert await eventually(lambda: processes_named(nap) > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await eventually(lambda: processes_named(nap) == 0)

    with_sandbox(backend, use)


def test_bubblewrap_dies_with_its_owner_d01_d23() -> None:
    """D01, D23: nothing stays when this process is killed."""
    require("bwrap")
    nap = f"100.{uuid.uuid4().int % 10**9}"
    program = (
        "import asyncio\n"
        "from envs.sandbox.base import SandboxSpec\n"
        "from envs.sandbox.bubblewrap import BubblewrapFactory\n"
        "async def main():\n"
        "    async with await BubblewrapFactory.create() as factory, await factory.start(SandboxSpec()) as sandbox:\n"
        f"        await sandbox.exec(['sh', '-c', 'trap : TERM; setsid sleep {nap} & sleep {nap}'], timeout_s=100)\n"
        "asyncio.run(main())\n"
    )
    # Its working folder is left, in a folder that goes with this test.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        owner = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": folder})
        try:
            assert asyncio.run(eventually(lambda: processes_named(f"sleep\0{nap}") == 2))
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
        assert asyncio.run(eventually(lambda: processes_named(nap) == 0))


@pytest.mark.docker
def test_a_container_ends_by_itself_d01() -> None:
    """D01: when its owner is gone, its time to live ends it, and it removes itself."""
    require("docker")

    async def main() -> None:
        async with await DockerFactory.create(ttl_s=1) as factory:
            await factory.start(SandboxSpec())
            assert await eventually(lambda: containers_of(factory) == 0)

    asyncio.run(main())
