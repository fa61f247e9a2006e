"""Programs that are made to escape a time-out or to read what is not theirs: each is compiled, put in, and run."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import shutil
import subprocess
from pathlib import Path

import pytest

from envs.sandbox.base import Sandbox, SandboxFile, SandboxSpec
from envs.sandbox.open import Backend
from tests.contracts.sandboxes import ISOLATED, own_pool, sh, with_sandbox

isolated = pytest.mark.parametrize("backend", ISOLATED)

MARK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static void mark(void)
{ int fd = open("grows", O_WRONLY | O_CREAT | O_APPEND, 0644); (void)!write(fd, "x", 1); close(fd); }
"""
PROGRAMS = {
    # A process whose first thread has ended looks like a zombie, and goes on.
    "threads": MARK + "static void *go(void *x) { for (;;) { mark(); usleep(20000); } return x; }\n"
    "int main(void) { pthread_t t; pthread_create(&t, 0, go, 0); pthread_exit(0); }",
    # Each process only starts the next one: no look at the process table finds it where the last one was seen.
    "chain": MARK
    + "int main(void) { for (int i = 0;; i++) { if (fork() != 0) _exit(0); setsid(); if (i % 50 == 0) mark(); } }",
    # What others have stopped, it lets go on.
    "waker": MARK + "int main(void) { signal(SIGTERM, SIG_IGN); for (;;) { kill(-1, SIGCONT); mark(); } }",
    # The keys of whoever started the sandbox.
    "keys": MARK
    + r"""
int main(void) { char text[4096]; long id = syscall(SYS_keyctl, 0, -3, 0);
  long size = syscall(SYS_keyctl, 11, id, text, sizeof text);
  for (long i = 0; i + 4 <= size; i += 4) { int key; char secret[256] = {0}; memcpy(&key, text + i, 4);
    if (syscall(SYS_keyctl, 11, key, secret, sizeof secret - 1) > 0) printf("key: %s\n", secret); }
  printf("looked\n"); }""",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SandboxFile]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("evaders")
    files = {"grows": SandboxFile(content=b"")}  # there from the start, however late they begin
    for name, text in PROGRAMS.items():
        (folder / f"{name}.c").write_text(text)
        command = ["cc", "-static", "-pthread", "-s", "-o", str(folder / name), str(folder / f"{name}.c")]
        subprocess.run(command, check=True, capture_output=True)
        files[name] = SandboxFile(content=Path(folder, name).read_bytes(), mode=0o755)
    return files


async def is_quiet(sandbox: Sandbox) -> bool:
    before = await sandbox.read_file("grows")
    await asyncio.sleep(0.3)
    return await sandbox.read_file("grows") == before


@isolated
@pytest.mark.parametrize("script", ["./threads; sleep 100", "./chain & sleep 100", "./waker & ./chain & sleep 100"])
def test_a_late_command_ends_however_it_hides_d03(
    backend: Backend, script: str, programs: dict[str, SandboxFile]
) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, script, timeout_s=1)
        assert (done.timed_out, done.processes_left) == (True, 0)
        assert await is_quiet(sandbox)
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use, SandboxSpec(files=programs))


@isolated
@pytest.mark.parametrize("program", ["threads", "chain"])
def test_who_kills_the_supervisor_takes_all_along(
    backend: Backend, program: str, programs: dict[str, SandboxFile]
) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, f"./{program} & sleep 0.3; kill -9 $PPID; sleep 100", timeout_s=20)
        assert (done.exit_code, done.timed_out) == (137, False)
        assert await is_quiet(sandbox)
        assert (await sh(sandbox, "echo again")).stdout == "again\n"

    with_sandbox(backend, use, SandboxSpec(files=programs))


@isolated
def test_the_keys_of_the_machine_are_not_seen_d25(backend: Backend, programs: dict[str, SandboxFile]) -> None:
    """D25: neither those in the session keyring of the process that trains, which its children inherit."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    secret = b"a secret of this machine"
    add_key, session = 248, -3  # x86-64; elsewhere the call fails or does nothing, and the test still holds
    libc.syscall(add_key, b"user", b"agentgrad-test", secret, len(secret), session)

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "./keys")).stdout == "looked\n"

    with own_pool():  # started by this process, after the key was added
        with_sandbox(backend, use, SandboxSpec(files=programs))
