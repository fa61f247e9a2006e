"""The sandbox contract, run on each back-end that isolates: what a command cannot see, reach, use up or break."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from pathlib import Path

import pytest

from envs.sandbox.base import MIB, Sandbox, SandboxFactory, SandboxLimits, SandboxSpec
from envs.sandbox.cgroup import ROOT, Cgroups
from envs.sandbox.open import Backend
from tests.contracts.sandboxes import (
    ALL,
    ISOLATED,
    TIMEOUT_S,
    environment_variable,
    run_sh,
    sh,
    with_factory,
    with_sandbox,
)

isolated = pytest.mark.parametrize("backend", ISOLATED)

# Whatever can open a connection: busybox's nc, or the machine's bash.
CONNECT = "if command -v nc; then nc -w 2 {host} {port} </dev/null; else bash -c 'exec 3<>/dev/tcp/{host}/{port}'; fi"
ZERO = "0" * 16
GROWS = SandboxSpec(files={"grows": b""})  # there from the start, however late what writes to it begins


def counts_as_a_whole(backend: Backend) -> bool:
    """Whether memory and processors of all commands together are limited; bubblewrap needs control groups for it."""
    return backend == "docker" or Cgroups.find() is not None


async def running(sandbox: Sandbox) -> set[str]:
    """The names of what runs in a sandbox, but its server and this question itself."""
    return set((await sh(sandbox, "cat /proc/[0-9]*/comm")).stdout.split()) - {"server", "sh", "cat"}


# --- what is seen and reached ---


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
def test_sandboxes_do_not_reach_each_other_d10(backend: Backend) -> None:
    """D10: not through the network, and not through a local socket of Linux's abstract names."""

    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as one, await factory.start(SandboxSpec()) as other:
            interfaces = "cat /proc/net/dev | tail -n +3 | cut -d: -f1"
            assert (await sh(one, interfaces)).stdout.split() == ["lo"]
            await sh(one, "touch /tmp/mark /dev/shm/mark")
            assert (await sh(other, "ls -A /tmp /dev/shm")).stdout.split() == ["/dev/shm:", "/tmp:"]
            assert "agentgrad-pool" not in (await sh(other, "cat /proc/net/unix")).stdout

    with_factory(backend, use)


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
        assert await running(sandbox) == set()
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
def test_the_server_is_closed_to_commands(backend: Backend) -> None:
    """Process 1 is of the same user; its memory, its open files and its variables are not to be had."""

    async def use(sandbox: Sandbox) -> None:
        for place in ("environ", "mem", "maps", "fd/0", "fd/1"):
            assert (await sh(sandbox, f"cat /proc/1/{place}", timeout_s=5)).exit_code == 1
        for supervisor in ("fd", "root"):
            assert (await sh(sandbox, f"ls /proc/$PPID/{supervisor}/", timeout_s=5)).exit_code != 0
        assert (await sh(sandbox, "echo forged > /proc/1/fd/1")).exit_code != 0
        for signal in ("TERM", "INT", "HUP", "STOP", "KILL", "CHLD", "SEGV"):
            await sh(sandbox, f"kill -{signal} 1")
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use)


# --- rights ---


@isolated
def test_commands_have_no_rights(backend: Backend) -> None:
    done = run_sh(backend, "id -u; id -g; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status")
    assert done.stdout.split() == ["65534", "65534", "CapEff:", ZERO, "CapBnd:", ZERO, "NoNewPrivs:", "1"]
    assert run_sh(backend, "mount -t tmpfs x /app || unshare -Ur id").exit_code != 0


@isolated
def test_root_only_where_it_is_declared(backend: Backend) -> None:
    """Root of the sandbox: it may write nothing more, mount nothing, and see no more of the machine."""
    spec = SandboxSpec(user="root")
    assert spec.relaxed == ("user root",)

    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, "id -u; echo $HOME; grep NoNewPrivs /proc/self/status")
        assert done.stdout.split() == ["0", "/root", "NoNewPrivs:", "1"]
        assert (await sh(sandbox, "mount -t tmpfs x /app || touch /usr/x || mknod /tmp/n b 1 1")).exit_code != 0
        assert (await sh(sandbox, "cat /proc/1/environ || cat /etc/shadow")).stdout == ""
        late = await sh(sandbox, "(setsid sleep 100 &); sleep 100", timeout_s=0.5)
        assert (late.timed_out, late.processes_left) == (True, 0)

    with_sandbox(backend, use, spec)


# --- limits ---


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
            await bombed.kill_all()
            assert await running(bombed) == set()

    with_factory(backend, use)


@isolated
def test_a_fork_bomb_in_sessions_of_its_own_ends_d08(backend: Backend) -> None:
    """D08: each process forks twice, leaves its session and ignores signals."""

    async def use(sandbox: Sandbox) -> None:
        bomb = "trap '' TERM HUP INT; echo x >> grows; (setsid ./bomb &); (setsid ./bomb &)"
        await sandbox.write_file("bomb", f"#!/bin/sh\n{bomb}\n".encode(), mode=0o755)
        # The command itself waits without a fork, which it could not have by then.
        done = await sh(sandbox, "./bomb; while :; do :; done", timeout_s=1.5)
        assert (done.timed_out, done.processes_left) == (True, 0)
        before = await sandbox.read_file("grows")
        await asyncio.sleep(0.3)
        assert await sandbox.read_file("grows") == before

    with_sandbox(backend, use, GROWS)


@isolated
def test_running_out_of_memory_is_named(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await sandbox.exec(["tail", "/dev/zero"], timeout_s=TIMEOUT_S)
        assert done.exit_code != 0
        assert not done.timed_out
        assert done.oom_killed == counts_as_a_whole(backend)
        # Also where it is a child that the kernel killed, and the command itself ends well.
        inner = await sh(sandbox, "sh -c 'tail /dev/zero'; echo ended")
        assert (inner.exit_code, inner.stdout, inner.oom_killed) == (0, "ended\n", counts_as_a_whole(backend))
        killed = await sh(sandbox, "kill -9 $$")
        assert (killed.exit_code, killed.oom_killed) == (137, False)

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(memory_bytes=64 * MIB)))


@isolated
def test_memory_of_all_processes_together(backend: Backend) -> None:
    """Ten processes that take little each are stopped where the sandbox as a whole is bounded."""
    if not counts_as_a_whole(backend):
        pytest.skip("bubblewrap limits each process only, without control groups")
    hog = "head -c 20000000 /dev/zero | tail -c 20000000 | sleep 1 &"

    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, f"{hog * 10} wait")
        assert done.oom_killed
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(memory_bytes=64 * MIB)))


@isolated
def test_files_never_fill_the_memory(backend: Backend) -> None:
    """Files lie in memory. However they are written, and by whom, it is no reason for a sandbox to end."""

    async def use(sandbox: Sandbox) -> None:
        scores = await sh(sandbox, "cat /proc/self/oom_score_adj /proc/1/oom_score_adj")
        assert scores.stdout.split() == ["500", "0"]
        for folder in (".", "/tmp", "/dev/shm", "/logs"):
            done = await sh(sandbox, f"dd if=/dev/zero of={folder}/big bs=65536 count=4000")
            assert done.exit_code != 0
            assert "No space left" in done.stderr or done.oom_killed
        for _ in range(20):
            assert (await sh(sandbox, "echo $(echo fine)")).stdout == "fine\n"
            with pytest.raises(OSError, match="No space left"):
                await sandbox.write_file("more", b"x" * 100_000)

    limits = SandboxLimits(memory_bytes=64 * MIB, disk_bytes=256 * MIB, max_file_bytes=512 * MIB)
    with_sandbox(backend, use, SandboxSpec(limits=limits, folders=("/logs",)))


@isolated
def test_what_a_command_asks_of_process_1_is_refused(backend: Backend) -> None:
    """The same user may change its limits and its place in the scheduler, as far as the kernel's own rules go."""
    asks = (
        "prlimit --pid 1 --nofile=1:1; renice -n 19 -p 1; renice -n 19 -u nobody; chrt --idle -p 0 1; ionice -c 3 -p 1"
    )

    async def use(sandbox: Sandbox) -> None:
        limits = await sh(sandbox, "grep 'open files' /proc/self/limits")
        await sh(sandbox, f"{asks}; taskset -p 1 1")
        assert (await sh(sandbox, "awk '{print $19}' /proc/1/stat; ulimit -n 64; ulimit -n")).stdout.split() == [
            "0",
            "64",
        ]
        assert (await sh(sandbox, "grep 'open files' /proc/self/limits")).stdout == limits.stdout
        busy = "i=0; while [ $i -lt 30 ]; do (while :; do :; done) & i=$((i+1)); done; wait"
        done = await sh(sandbox, busy, timeout_s=2)
        assert (done.timed_out, done.processes_left) == (True, 0)

    with_sandbox(backend, use)


@isolated
def test_two_at_once_may_kill_everything(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "sleep 100 & sleep 100 & echo")).processes_left == 2
        assert sum(await asyncio.gather(*(sandbox.kill_all() for _ in range(4)))) >= 2
        assert await running(sandbox) == set()

    with_sandbox(backend, use)


@isolated
def test_processors_are_limited(backend: Backend) -> None:
    if not counts_as_a_whole(backend):
        pytest.skip("bubblewrap limits no processors without control groups")

    async def use(sandbox: Sandbox) -> None:
        if backend == "docker":
            script = "cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max 2>/dev/null"
            assert (await sh(sandbox, script)).stdout.split()[0] == "25000"
        else:
            groups = [*ROOT.glob("cpu/agentgrad/*/cpu.cfs_quota_us"), *ROOT.glob("agentgrad/*/cpu.max")]
            assert "25000" in [group.read_text().split()[0] for group in groups]

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(cpus=0.25)))


# --- what is broken on purpose ---


@isolated
def test_killing_everything_hurts_only_the_command(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, "(setsid sleep 100 &); kill -9 -1; kill -9 1; sleep 100")
        assert (done.exit_code, done.timed_out) == (137, False)
        assert await running(sandbox) == set()

    with_sandbox(backend, use)


@isolated
def test_killing_the_supervisor_frees_nobody(backend: Backend) -> None:
    """A command that kills or stops what watches it is ended with all it started."""

    async def use(sandbox: Sandbox) -> None:
        loop = "(setsid sh -c 'while :; do echo x >> grows; sleep 0.05; done' &)"
        done = await sh(sandbox, f"{loop}; sleep 0.2; kill -9 $PPID")
        assert done.exit_code == 137
        before = await sandbox.read_file("grows")
        await asyncio.sleep(0.3)
        assert await sandbox.read_file("grows") == before
        stopped = await sh(sandbox, "kill -STOP $PPID; (setsid sleep 100 &); sleep 100", timeout_s=1)
        assert (stopped.timed_out, stopped.processes_left) == (True, 0)
        assert await running(sandbox) == set()

    with_sandbox(backend, use, GROWS)


@isolated
def test_orphans_are_reaped_d06(backend: Backend) -> None:
    """D06: processes that nobody waits for do not pile up as zombies."""

    async def use(sandbox: Sandbox) -> None:
        for _ in range(10):
            assert (await sh(sandbox, "i=0; while [ $i -lt 50 ]; do (true &); i=$((i+1)); done")).exit_code == 0
        await asyncio.sleep(0.3)
        assert (await sh(sandbox, "cat /proc/[0-9]*/stat | grep -c ') Z '")).stdout == "0\n"
        assert (await sh(sandbox, "echo again | cat")).stdout == "again\n"

    with_sandbox(backend, use)


def test_a_temporary_folder_is_not_seen_by_name() -> None:
    """Nothing of an isolated sandbox lies in a folder of this machine, so nothing there can be followed or left."""

    def folders() -> set[str]:
        return {path.name for path in Path(tempfile.gettempdir()).glob("agentgrad-*")}

    async def use(sandbox: Sandbox) -> set[str]:
        await sh(sandbox, "echo x > a")
        return folders()

    before = folders()
    assert with_sandbox("bubblewrap", use) == before
