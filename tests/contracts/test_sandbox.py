"""The sandbox contract, run on each back-end: commands, output, time limits, files, closing."""

from __future__ import annotations

import asyncio
import resource

import pytest

from envs.base import Session
from envs.lookup_calc import LookupCalc
from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.sandbox.command import COMMAND_ENVIRONMENT
from envs.sandbox.open import Backend
from envs.types import ToolCall, ToolResult
from tests.contracts.sandboxes import ALL, TIMEOUT_S, run_sh, sh, with_factory, with_sandbox

pytestmark = pytest.mark.parametrize("backend", ALL)

# A loop in a session of its own, started by a process that has already ended.
DETACHED_LOOP = "(setsid sh -c 'while :; do echo x >> grows; sleep 0.05; done' &) ; sleep 100"


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_is_exact(backend: Backend, code: int) -> None:
    assert run_sh(backend, f"exit {code}").exit_code == code


@pytest.mark.parametrize(("signal", "code"), [("KILL", 137), ("TERM", 143)])
def test_a_signal_is_128_more(backend: Backend, signal: str, code: int) -> None:
    done = run_sh(backend, f"kill -{signal} $$")
    assert (done.exit_code, done.stdout, done.stderr, done.oom_killed) == (code, "", "", False)


@pytest.mark.parametrize(
    ("script", "stdout", "stderr"),
    [("echo out; echo err >&2", "out\n", "err\n"), ("true", "", ""), ("echo err >&2", "", "err\n")],
)
def test_streams_are_separate_d18(backend: Backend, script: str, stdout: str, stderr: str) -> None:
    """D18: no output is the empty text, and only stderr is only stderr."""
    done = run_sh(backend, script)
    assert (done.exit_code, done.stdout, done.stderr) == (0, stdout, stderr)


@pytest.mark.parametrize(
    ("program", "code"), [("no-such-program", 127), ("./no/such", 127), ("exit", 127), ("./table", 126), (".", 126)]
)
def test_programs_that_cannot_run_d18(backend: Backend, program: str, code: int) -> None:
    """D18: a missing program is never success; a shell's builtin is not a program; a table is not executable."""
    spec = SandboxSpec(files={"table": b"a\t1\n"})
    done = with_sandbox(backend, lambda sandbox: sandbox.exec([program, "0"], timeout_s=TIMEOUT_S), spec)
    assert done.exit_code == code
    assert done.stderr


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
        assert (await sandbox.exec(["echo", "x" * 200_000], timeout_s=TIMEOUT_S)).exit_code == 126
        assert (await sandbox.exec(["echo", "a\ud800"], timeout_s=TIMEOUT_S)).stdout == "a?\n"

    with_sandbox(backend, use)


def test_stdin_is_given(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "wc -c", stdin=bytes(range(256)) * 1000)).stdout.strip() == "256000"
        # A command that never reads it must not hold the call.
        assert (await sh(sandbox, "exit 4", stdin=b"x" * 1_000_000)).exit_code == 4

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


def test_a_late_command_is_killed_d03(backend: Backend) -> None:
    """D03: partial output, every process gone (also one that left the session), the sandbox usable afterwards."""
    script = DETACHED_LOOP if backend != "local" else "while :; do echo x >> grows; sleep 0.05; done"

    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, f"echo part; {script}", timeout_s=1)
        assert (done.timed_out, done.exit_code, done.stdout) == (True, 124, "part\n")
        before = await sandbox.read_file("grows")
        await asyncio.sleep(0.3)
        assert await sandbox.read_file("grows") == before != b""
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use)


def test_a_flood_is_bounded_d07(backend: Backend) -> None:
    """D07: the head is kept, the command is killed, and memory does not grow with the output."""

    async def use(sandbox: Sandbox) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        done = await sandbox.exec(["yes"], timeout_s=TIMEOUT_S, max_output_bytes=1000)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB
        assert (done.exit_code, done.output_truncated, done.timed_out) == (137, True, False)
        assert done.stdout == "y\n" * 500
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use)


def test_a_long_output_keeps_its_exit_code(backend: Backend) -> None:
    argv = ["sh", "-c", "seq 100000; seq 100000 >&2; exit 5"]
    done = with_sandbox(backend, lambda sandbox: sandbox.exec(argv, timeout_s=TIMEOUT_S, max_output_bytes=14))
    assert (done.exit_code, done.stdout, done.output_truncated) == (5, "1\n2\n3\n4\n5\n6\n7\n", True)
    assert done.stderr == done.stdout


def test_output_as_long_as_the_limit_is_whole(backend: Backend) -> None:
    argv = ["printf", "12345"]
    done = with_sandbox(backend, lambda sandbox: sandbox.exec(argv, timeout_s=TIMEOUT_S, max_output_bytes=5))
    assert (done.stdout, done.output_truncated) == ("12345", False)


def test_output_that_is_no_utf8_d12(backend: Backend) -> None:
    """D12: Latin-1 and UTF-16 are replaced, a character that the limit cuts is left out."""
    files = {"latin": "été".encode("latin-1"), "utf16": "hé".encode("utf-16"), "face": "ab😀".encode()}

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "cat latin")).stdout == "\ufffdt\ufffd"
        assert "\ufffd" in (await sh(sandbox, "cat utf16")).stdout
        cut = await sandbox.exec(["cat", "face"], timeout_s=TIMEOUT_S, max_output_bytes=4)
        assert (cut.stdout, cut.output_truncated) == ("ab", True)

    with_sandbox(backend, use, SandboxSpec(files=files))


def test_a_background_child_does_not_hold_the_call_d05(backend: Backend) -> None:
    """D05: in Docker the child is there for the next command; elsewhere it ends with its own."""

    async def use(sandbox: Sandbox) -> None:
        loop = "while :; do echo x >> grows; sleep 0.05; done"
        done = await sh(sandbox, f"touch grows; {{ {loop}; }} & echo started", timeout_s=TIMEOUT_S)
        assert (done.exit_code, done.stdout, done.timed_out) == (0, "started\n", False)
        await asyncio.sleep(0.2)
        before = await sandbox.read_file("grows")
        await asyncio.sleep(0.5)
        alive = await sandbox.read_file("grows") != before
        assert alive == (backend == "docker")

    with_sandbox(backend, use)


def test_the_environment_is_clean(backend: Backend) -> None:
    names = {line.split("=")[0] for line in run_sh(backend, "env").stdout.splitlines()}
    assert names - {"PWD", "SHLVL", "HOSTNAME", "OLDPWD", "_"} == {"PATH", "HOME", *COMMAND_ENVIRONMENT}


def test_files_of_the_spec_are_there(backend: Backend) -> None:
    spec = SandboxSpec(files={"a.txt": b"one", "b/c/d.bin": bytes(range(256)), "empty": b""})

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "cat a.txt; wc -c < b/c/d.bin; ls; touch b/new a.txt")).exit_code == 0
        for path, content in spec.files.items():
            assert await sandbox.read_file(path) == content

    with_sandbox(backend, use, spec)


def test_files_are_written_and_read(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        content = bytes(range(256)) * 2000
        for path in ("x", "deep/er/x", "-n", "two words'", "é\n"):
            await sandbox.write_file(path, content)
            assert await sandbox.read_file(path) == content
        await sandbox.write_file("x", b"")
        assert await sandbox.read_file("x") == b""
        assert (await sh(sandbox, "wc -c < deep/er/x; rm x")).stdout.strip() == "512000"
        for path in ("x", "no/such", "deep"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)

    with_sandbox(backend, use)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b"])
def test_paths_that_leave_the_folder(backend: Backend, path: str) -> None:
    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as sandbox:
            with pytest.raises(ValueError, match="working folder"):
                await sandbox.read_file(path)
            with pytest.raises(ValueError, match="working folder"):
                await sandbox.write_file(path, b"x")
        with pytest.raises(ValueError, match="working folder"):
            await factory.start(SandboxSpec(files={path: b"x"}))

    with_factory(backend, use)


def test_links_and_things_that_are_no_files(backend: Backend) -> None:
    """A link is followed inside the folder and refused outside; what is no plain file never hangs a call."""

    async def use(sandbox: Sandbox) -> None:
        made = await sh(sandbox, "echo in > a; ln -s a in; ln -s /etc/passwd out; ln -s / root; mkfifo pipe; mkdir d")
        assert made.exit_code == 0
        assert await sandbox.read_file("in") == b"in\n"
        for path in ("out", "root/etc/passwd"):
            with pytest.raises(ValueError, match="working folder"):
                await sandbox.read_file(path)
            with pytest.raises(ValueError, match="working folder"):
                await sandbox.write_file(path, b"x")
        for path in ("pipe", "d"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)
            with pytest.raises(OSError, match="cannot be written"):
                await sandbox.write_file(path, b"x")

    with_sandbox(backend, use)


def test_the_working_folder_lasts_and_is_private(backend: Backend) -> None:
    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as one, await factory.start(SandboxSpec()) as other:
            await sh(one, "echo mine > note")
            assert (await sh(one, "cat note")).stdout == "mine\n"
            assert (await sh(other, "ls -A")).stdout == ""

    with_factory(backend, use)


def test_commands_run_side_by_side(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await asyncio.gather(*(sh(sandbox, f"sleep 0.1; echo {number}") for number in range(6)))
        assert [result.stdout for result in done] == [f"{number}\n" for number in range(6)]

    with_sandbox(backend, use)


def test_closing(backend: Backend) -> None:
    """Twice is fine; a command that runs ends; afterwards everything is an error that says so."""

    async def use(factory: SandboxFactory) -> None:
        sandbox = await factory.start(SandboxSpec())
        running = asyncio.ensure_future(sh(sandbox, "sleep 100"))
        await asyncio.sleep(0.3)
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxError, match="closed while"):
            await running
        for late in (sandbox.exec(["true"], timeout_s=1), sandbox.read_file("a"), sandbox.write_file("a", b"")):
            with pytest.raises(SandboxError, match="is closed"):
                await late
        open_one = await factory.start(SandboxSpec())
        await factory.close()
        with pytest.raises(SandboxError, match="is closed"):
            await open_one.exec(["true"], timeout_s=1)
        with pytest.raises(SandboxError, match="is closed"):
            await factory.start(SandboxSpec())

    with_factory(backend, use)


def test_the_tools_of_lookup_calc_run(backend: Backend) -> None:
    env = LookupCalc()
    task = env.tasks("train", 1, seed=7)[0]
    key, value = task.files["table.tsv"].decode().splitlines()[0].split("\t")

    async def call(session: Session, name: str, argument: str) -> ToolResult:
        field = "key" if name == "lookup" else "expression"
        return await session.call(ToolCall(call_id="1", name=name, arguments={field: argument}))

    async def use(sandbox: Sandbox) -> None:
        session = env.session(task, sandbox)
        right = await call(session, "lookup", key)
        assert (right.content, right.is_error) == (value, False)
        assert (await call(session, "calculate", "(2 + 3) * -4.5")).content == "-22.5"
        wrong = await call(session, "lookup", "area of Atlantis")
        assert wrong.is_error
        assert "unknown key 'area of Atlantis'" in wrong.content
        for expression in ("1 / 0", "2 +", 'system("id")', "9" * 200_000):
            failed = await call(session, "calculate", expression)
            assert (failed.is_error, failed.content.startswith("error:")) == (True, True)

    with_sandbox(backend, use, env.sandbox_spec(task))
