"""The sandbox contract, run on each back-end: shell sessions, and the sandbox as a whole from its start to its end."""

from __future__ import annotations

import asyncio

import pytest

from envs.base import Session
from envs.lookup_calc import LookupCalc
from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.sandbox.open import Backend
from envs.types import ToolCall, ToolResult
from tests.contracts.sandboxes import ALL, TIMEOUT_S, sh, with_factory, with_sandbox

pytestmark = pytest.mark.parametrize("backend", ALL)

LOOP = "while :; do echo x >> grows; sleep 0.05; done"


# --- shell sessions ---


def test_a_shell_session_lasts(backend: Backend) -> None:
    """The folder and the exported variables; not a plain variable, and nothing of another session."""

    async def use(sandbox: Sandbox) -> None:
        shell, other = sandbox.shell(), sandbox.shell()
        await shell.run(
            "mkdir -p a/b; cd a/b; export X='1 é\n2' Y=y; unset NO_COLOR; plain=z; exit 3", timeout_s=TIMEOUT_S
        )
        done = await shell.run('pwd; echo "$X|$Y|$NO_COLOR|$plain"', timeout_s=TIMEOUT_S)
        assert done.stdout.splitlines()[0].endswith("/a/b")
        assert done.stdout.splitlines()[1:] == ["1 é", "2|y||"]
        assert (await other.run('echo "$Y"; pwd | grep -c a/b', timeout_s=TIMEOUT_S)).stdout == "\n0\n"
        assert (await shell.run("exit 7", timeout_s=TIMEOUT_S)).exit_code == 7
        assert (await shell.run("cat", timeout_s=TIMEOUT_S, stdin=b"in")).stdout == "in"

    with_sandbox(backend, use)


def test_a_shell_session_survives_what_its_commands_do(backend: Backend) -> None:
    """A late one, a killed one, one that is no shell syntax, one that removes its own folder."""

    async def use(sandbox: Sandbox) -> None:
        shell = sandbox.shell()
        await shell.run("export X=1; mkdir d; cd d", timeout_s=TIMEOUT_S)
        assert (await shell.run("export X=2; sleep 100", timeout_s=0.5)).timed_out
        assert (await shell.run("export X=3; kill -9 $$", timeout_s=TIMEOUT_S)).exit_code == 137
        assert (await shell.run("if then ( ", timeout_s=TIMEOUT_S)).exit_code == 2
        assert (await shell.run("exec sh -c 'exit 5'", timeout_s=TIMEOUT_S)).exit_code == 5
        assert (await shell.run("echo $X; pwd", timeout_s=TIMEOUT_S)).stdout.endswith("/d\n")
        await shell.run("rm -r ../d", timeout_s=TIMEOUT_S)
        assert (await shell.run("echo $X", timeout_s=TIMEOUT_S)).stdout == "1\n"
        left = await shell.run("sleep 100 & echo $!", timeout_s=TIMEOUT_S)
        assert (left.exit_code, left.processes_left) == (0, 1)
        with pytest.raises(ValueError, match="NUL"):
            await shell.run("echo \0", timeout_s=TIMEOUT_S)

    with_sandbox(backend, use)


# --- the sandbox as a whole ---


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
        for late in (sandbox.reset(), sandbox.kill_all(), sandbox.shell().run("true", timeout_s=1)):
            with pytest.raises(SandboxError, match="is closed"):
                await late
        open_one = await factory.start(SandboxSpec())
        await factory.close()
        with pytest.raises(SandboxError, match="is closed"):
            await open_one.exec(["true"], timeout_s=1)
        with pytest.raises(SandboxError, match="is closed"):
            await factory.start(SandboxSpec())

    with_factory(backend, use)


def test_a_reset_leaves_nothing_d22(backend: Backend) -> None:
    """D22: files, processes and folders of before are gone; the files of the spec are as they were."""

    async def use(sandbox: Sandbox) -> None:
        shell = sandbox.shell()
        await shell.run("cd /tmp; export X=1", timeout_s=TIMEOUT_S)
        await sh(sandbox, f"echo changed > a; mkdir d; touch d/x; chmod 0 d; touch grows; {{ {LOOP}; }} & echo new > n")
        await sandbox.reset()
        assert (await sh(sandbox, "ls -A; cat a")).stdout == "a\nsame"
        assert (await shell.run("echo $X; ls", timeout_s=TIMEOUT_S)).stdout == "\na\n"
        assert (await sh(sandbox, "cat /proc/[0-9]*/comm | grep -c sleep")).stdout == "0\n" or backend == "local"

    with_sandbox(backend, use, SandboxSpec(files={"a": b"same"}))


def test_the_working_folder_lasts_and_is_private(backend: Backend) -> None:
    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as one, await factory.start(SandboxSpec()) as other:
            await sh(one, "echo mine > note")
            assert (await sh(one, "cat note")).stdout == "mine\n"
            assert (await sh(other, "ls -A")).stdout == ""

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
