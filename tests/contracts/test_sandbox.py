"""The sandbox contract, run on each back-end: commands, what goes in and comes out, their time limits."""

from __future__ import annotations

import asyncio
import random
import resource

import pytest

from envs.sandbox.base import Sandbox, SandboxSpec
from envs.sandbox.open import Backend
from envs.sandbox.served import COMMAND_ENVIRONMENT
from tests.contracts.sandboxes import ALL, TIMEOUT_S, run_sh, sh, with_sandbox

pytestmark = pytest.mark.parametrize("backend", ALL)

# A loop in a session of its own, started by a process that has already ended.
DETACHED_LOOP = "(setsid sh -c 'while :; do echo x >> grows; sleep 0.05; done' &) ; sleep 100"
LOOP = "while :; do echo x >> grows; sleep 0.05; done"
GROWS = SandboxSpec(files={"grows": b""})  # there from the start, however late the loop begins


async def grows(sandbox: Sandbox) -> bool:
    before = await sandbox.read_file("grows")
    await asyncio.sleep(0.4)
    return await sandbox.read_file("grows") != before


# --- how a command ends ---


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_is_exact(backend: Backend, code: int) -> None:
    assert run_sh(backend, f"exit {code}").exit_code == code


@pytest.mark.parametrize(("signal", "code"), [("KILL", 137), ("TERM", 143)])
def test_a_signal_is_128_more(backend: Backend, signal: str, code: int) -> None:
    done = run_sh(backend, f"kill -{signal} $$")
    assert (done.exit_code, done.stdout, done.stderr, done.oom_killed) == (code, "", "", False)


@pytest.mark.parametrize(
    ("program", "code"), [("no-such-program", 127), ("./no/such", 127), ("exit", 127), ("./table", 126), (".", 126)]
)
def test_programs_that_cannot_run_d18(backend: Backend, program: str, code: int) -> None:
    """D18: a missing program is never success; a shell's builtin is not a program; a table is not executable."""
    spec = SandboxSpec(files={"table": b"a\t1\n"})
    done = with_sandbox(backend, lambda sandbox: sandbox.exec([program, "0"], timeout_s=TIMEOUT_S), spec)
    assert done.exit_code == code
    assert done.stderr
    assert code != 127 or done.stderr == f"{program}: command not found\n"


def test_a_command_line_or_a_program_with_arguments(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sandbox.exec("echo $((1 + 1)) | tr 2 b", timeout_s=TIMEOUT_S)).stdout == "b\n"
        assert (await sandbox.exec(["echo", "$((1 + 1))"], timeout_s=TIMEOUT_S)).stdout == "$((1 + 1))\n"

    with_sandbox(backend, use)


def test_the_duration_is_measured(backend: Backend) -> None:
    assert run_sh(backend, "sleep 0.3").duration_s >= 0.3


# --- what goes in ---


def test_arguments_arrive_as_they_are(backend: Backend) -> None:
    words = ["-n", "", "two words", "'\"", "$HOME `id`", "a\nb", "*", "é", "--"]
    argv = ["sh", "-c", 'printf "%s|" "$@"', "sh", *words]
    done = with_sandbox(backend, lambda sandbox: sandbox.exec(argv, timeout_s=TIMEOUT_S))
    assert done.stdout == "|".join(words) + "|"


def test_arguments_that_no_program_can_be_given(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        for argv in ([], [""], ["echo", "a\0b"]):
            with pytest.raises(ValueError, match="argv must"):
                await sandbox.exec(argv, timeout_s=TIMEOUT_S)
        for words in (["x" * 200_000], ["x" * 5_000_000], [""] * 500_000):
            assert (await sandbox.exec(["echo", *words], timeout_s=TIMEOUT_S)).exit_code == 126
        assert (await sandbox.exec(["echo"], timeout_s=TIMEOUT_S, cwd="x" * 5_000_000)).exit_code == 126
        assert (await sandbox.exec(["echo", "a\ud800"], timeout_s=TIMEOUT_S)).stdout == "a?\n"

    with_sandbox(backend, use)


def test_stdin_is_given(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "wc -c", stdin=bytes(range(256)) * 10_000)).stdout.strip() == "2560000"
        # A command that never reads it must not hold the call, nor others.
        assert (await sh(sandbox, "exit 4", stdin=b"x" * 1_000_000)).exit_code == 4
        slow = asyncio.ensure_future(sh(sandbox, "until [ -e go ]; do sleep 0.05; done; wc -c", stdin=b"x" * 1_000_000))
        assert (await sh(sandbox, "echo quick")).stdout == "quick\n"
        assert not slow.done()
        await sandbox.write_file("go", b"")
        assert (await slow).stdout.strip() == "1000000"

    with_sandbox(backend, use)


def test_stdin_ends_at_once_d13(backend: Backend) -> None:
    """D13: nobody sits at the keyboard; a pager, an editor or a prompt does not wait."""

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "cat")).stdout == ""
        assert (await sh(sandbox, "read x; echo $?")).stdout == "1\n"
        assert (await sh(sandbox, 'echo "$PAGER $EDITOR $TERM"')).stdout == "cat true dumb\n"
        endless = await sh(sandbox, "while :; do echo 'Continue? [y/n]'; read answer; sleep 0.01; done", timeout_s=1)
        assert endless.timed_out
        assert endless.stdout.startswith("Continue? [y/n]\n")

    with_sandbox(backend, use)


def test_there_is_no_terminal_b20(backend: Backend) -> None:
    """B20, in part: programs that colour their output for a terminal see none."""
    done = run_sh(
        backend,
        "[ -t 0 ] || [ -t 1 ] || [ -t 2 ] || echo none; echo $NO_COLOR; (: </dev/tty) 2>/dev/null || echo no tty",
    )
    assert done.stdout == "none\n1\nno tty\n"


def test_the_environment_is_clean(backend: Backend) -> None:
    names = {line.split("=")[0] for line in run_sh(backend, "env").stdout.splitlines()}
    assert names - {"PWD", "SHLVL", "HOSTNAME", "OLDPWD", "_"} == {"PATH", "HOME", *COMMAND_ENVIRONMENT}


def test_variables_and_the_folder_of_one_command(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.write_file("deep/er/x", b"")
        done = await sandbox.exec(
            "pwd; echo $A; ls", timeout_s=TIMEOUT_S, cwd="deep/er", env={"A": "é $x", "PAGER": "y"}
        )
        lines = done.stdout.splitlines()
        assert (lines[0].endswith("/deep/er"), lines[1:]) == (True, ["é $x", "x"])
        assert (await sh(sandbox, "echo $A; pwd | grep -c deep")).stdout == "\n0\n"
        missing = await sandbox.exec(["pwd"], timeout_s=TIMEOUT_S, cwd="no/such")
        assert (missing.exit_code, missing.stderr) == (126, "no/such: No such file or directory\n")
        for odd in ({"A": "\0"}, {"": "x"}, {"A=B": "x"}):
            with pytest.raises(ValueError, match="without '=', and no NUL"):
                await sandbox.exec(["pwd"], timeout_s=TIMEOUT_S, env=odd)

    with_sandbox(backend, use)


# --- what comes out ---


@pytest.mark.parametrize(
    ("script", "stdout", "stderr"),
    [("echo out; echo err >&2", "out\n", "err\n"), ("true", "", ""), ("echo err >&2", "", "err\n")],
)
def test_streams_are_separate_d18(backend: Backend, script: str, stdout: str, stderr: str) -> None:
    """D18: no output is the empty text, and only stderr is only stderr."""
    done = run_sh(backend, script)
    assert (done.exit_code, done.stdout, done.stderr) == (0, stdout, stderr)


def test_every_byte_passes(backend: Backend) -> None:
    """Also those that mean something to a container engine, a terminal or a line protocol."""
    content = random.Random(0).randbytes(300_000) + bytes(range(256)) + b"\x10\x11\x1b[0m\r\n\x04"

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "cat > copy", stdin=content)).exit_code == 0
        assert await sandbox.read_file("copy") == content

    with_sandbox(backend, use)


def test_a_flood_is_bounded_b19_d07(backend: Backend) -> None:
    """B19, D07: head and tail are kept, the command is killed, and memory does not grow with the output."""

    async def use(sandbox: Sandbox) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = await sandbox.exec(["yes"], timeout_s=TIMEOUT_S, max_output_bytes=1000)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB
        assert (done.exit_code, done.output_truncated, done.timed_out) == (137, True, False)
        head, mark, tail = done.stdout.partition("\n[... ")
        assert head == "y\n" * 250
        assert mark
        assert tail.partition(" bytes cut ...]\n")[2].replace("y", "").replace("\n", "") == ""
        on_stderr = await sandbox.exec("yes >&2", timeout_s=TIMEOUT_S)
        assert (on_stderr.exit_code, on_stderr.output_truncated) == (137, True)
        one_line = await sandbox.exec(
            "head -c 50000000 /dev/zero | tr '\\0' x", timeout_s=TIMEOUT_S, max_output_bytes=10
        )
        assert (one_line.exit_code, one_line.stdout) == (0, "xxxxx\n[... 49999990 bytes cut ...]\nxxxxx")
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use)


@pytest.mark.parametrize("limit", [1, 9, 14, 64])
def test_head_and_tail_of_a_long_output(backend: Backend, limit: int) -> None:
    whole = "".join(f"{number}\n" for number in range(1, 50_001))
    argv = ["sh", "-c", "seq 50000; seq 50000 >&2; exit 5"]
    done = with_sandbox(backend, lambda sandbox: sandbox.exec(argv, timeout_s=TIMEOUT_S, max_output_bytes=limit))
    head, tail = whole[: limit // 2], whole[len(whole) - (limit - limit // 2) :]
    assert (done.exit_code, done.output_truncated) == (5, True)
    assert done.stdout == f"{head}\n[... {len(whole) - limit} bytes cut ...]\n{tail}"
    assert done.stderr == done.stdout


def test_output_as_long_as_the_limit_is_whole(backend: Backend) -> None:
    argv = ["printf", "12345"]
    done = with_sandbox(backend, lambda sandbox: sandbox.exec(argv, timeout_s=TIMEOUT_S, max_output_bytes=5))
    assert (done.stdout, done.output_truncated) == ("12345", False)


def test_output_that_is_no_utf8_b18_d12(backend: Backend) -> None:
    """B18, D12: Latin-1, UTF-16 and noise are replaced, a character that the limit cuts is left out."""
    files = {
        "latin": "été".encode("latin-1"),
        "utf16": "hé".encode("utf-16"),
        "faces": "😀😀😀".encode(),
        "noise": random.Random(1).randbytes(4096),
    }

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "cat latin")).stdout == "\ufffdt\ufffd"
        assert "\ufffd" in (await sh(sandbox, "cat utf16")).stdout
        noise = (await sh(sandbox, "cat noise; printf '\\377\\376'")).stdout
        assert noise.encode().decode() == noise
        cut = await sandbox.exec(["cat", "faces"], timeout_s=TIMEOUT_S, max_output_bytes=10)
        assert (cut.stdout, cut.output_truncated) == ("😀\n[... 2 bytes cut ...]\n😀", True)

    with_sandbox(backend, use, SandboxSpec(files=files))


# --- time limits, and what a command leaves running ---


def test_a_late_command_is_killed_d03(backend: Backend) -> None:
    """D03: partial output, every process gone (also one that left the session), the sandbox usable afterwards."""

    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, f"echo part; {DETACHED_LOOP}", timeout_s=1)
        assert (done.timed_out, done.exit_code, done.stdout, done.processes_left) == (True, 124, "part\n", 0)
        assert not await grows(sandbox)
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use, GROWS)


def test_a_late_command_dies_alone(backend: Backend) -> None:
    """What runs beside it, and what earlier commands left in the background, goes on."""

    async def use(sandbox: Sandbox) -> None:
        started = await sh(sandbox, f"touch grows; setsid sh -c '{LOOP}' >/dev/null 2>&1 & echo up")
        beside = asyncio.ensure_future(sh(sandbox, "sleep 2; echo done"))
        late = await sh(sandbox, "trap '' TERM INT HUP; sleep 100 & sleep 100", timeout_s=0.5)
        assert (started.stdout, late.timed_out, late.processes_left) == ("up\n", True, 0)
        assert await grows(sandbox)
        assert (await beside).stdout == "done\n"

    with_sandbox(backend, use)


def test_a_time_limit_of_nothing(backend: Backend) -> None:
    assert with_sandbox(backend, lambda sandbox: sandbox.exec("echo x", timeout_s=float("inf"))).stdout == "x\n"
    done = with_sandbox(backend, lambda sandbox: sandbox.exec(["sleep", "9"], timeout_s=0))
    assert (done.timed_out, done.exit_code) == (True, 124)


def test_a_background_child_does_not_hold_the_call_d05(backend: Backend) -> None:
    """D05: it is there for the next command, may go on writing to the output that nobody reads, and is counted."""

    async def use(sandbox: Sandbox) -> None:
        loop = "while :; do echo x; echo y >&2; echo x >> grows; sleep 0.05; done"
        done = await sh(sandbox, f"touch grows; {{ {loop}; }} & echo started", timeout_s=TIMEOUT_S)
        assert (done.exit_code, "started" in done.stdout.splitlines(), done.timed_out) == (0, True, False)
        assert done.processes_left >= 1
        assert await grows(sandbox)
        assert (await sh(sandbox, "echo next")).stdout == "next\n"
        assert await sandbox.kill_all() >= 1
        assert not await grows(sandbox)

    with_sandbox(backend, use)


def test_commands_run_side_by_side(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await asyncio.gather(*(sh(sandbox, f"sleep 0.1; echo {number}") for number in range(12)))
        assert [result.stdout for result in done] == [f"{number}\n" for number in range(12)]

    with_sandbox(backend, use)
