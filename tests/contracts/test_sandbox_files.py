"""The sandbox contract, run on each back-end: files go in and come out byte by byte, and nothing odd holds a call."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from envs.sandbox.base import MIB, Sandbox, SandboxError, SandboxFactory, SandboxFile, SandboxLimits, SandboxSpec
from envs.sandbox.open import Backend
from tests.contracts.sandboxes import ALL, ISOLATED, sh, with_factory, with_sandbox

every = pytest.mark.parametrize("backend", ALL)
isolated = pytest.mark.parametrize("backend", ISOLATED)


@every
def test_files_of_the_spec_are_there(backend: Backend) -> None:
    files = {
        "a.txt": b"one",
        "b/c/d.bin": bytes(range(256)),
        "empty": b"",
        "run": SandboxFile(content=b"#!/bin/sh\necho ran\n", mode=0o755),
        "secret": SandboxFile(content=b"x", mode=0o600),
    }

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "cat a.txt; wc -c < b/c/d.bin; ls; touch b/new a.txt")).exit_code == 0
        for path, file in files.items():
            content = file if isinstance(file, bytes) else file.content
            assert await sandbox.read_file(path) == content
        assert (await sh(sandbox, "./run")).stdout == "ran\n"
        assert (await sh(sandbox, "stat -c %a a.txt run secret")).stdout.split() == ["644", "755", "600"]

    with_sandbox(backend, use, SandboxSpec(files=files))


@every
def test_files_are_written_and_read(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        content = bytes(range(256)) * 2000
        for path in ("x", "deep/er/x", "-n", "two words'", "é\n", "a" * 255):
            await sandbox.write_file(path, content)
            assert await sandbox.read_file(path) == content
        await sandbox.write_file("x", b"", mode=0o700)
        assert await sandbox.read_file("x") == b""
        assert (await sh(sandbox, "stat -c %a x; wc -c < deep/er/x; rm x")).stdout.split() == ["700", "512000"]
        for path in ("x", "no/such", "deep", "deep/er/x/y", "a" * 300, "d/" * 3000):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)

    with_sandbox(backend, use)


@every
def test_large_files_beside_commands(backend: Backend) -> None:
    """Several files move at once, in pieces, while commands run."""

    async def use(sandbox: Sandbox) -> None:
        contents = {f"f{number}": os.urandom(3 * MIB + number) for number in range(4)}
        writing = asyncio.gather(*(sandbox.write_file(path, content) for path, content in contents.items()))
        assert (await sh(sandbox, "echo between")).stdout == "between\n"
        await writing
        read = await asyncio.gather(*(sandbox.read_file(path) for path in contents))
        assert read == list(contents.values())

    with_sandbox(backend, use)


@every
def test_a_file_that_is_too_large(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.write_file("a", b"x" * 1000)
        assert len(await sandbox.read_file("a", max_bytes=1000)) == 1000
        with pytest.raises(ValueError, match="'a' is larger than 999 bytes"):
            await sandbox.read_file("a", max_bytes=999)
        with pytest.raises(OSError, match="'b' cannot be written: File too large"):
            await sandbox.write_file("b", b"x" * (2 * MIB + 1))
        assert await sandbox.read_file("a") == b"x" * 1000

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(max_file_bytes=2 * MIB)))


@every
def test_paths_that_are_none(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        for path in ("", "a\0b"):
            with pytest.raises(ValueError, match="must not be empty or hold NUL"):
                await sandbox.read_file(path)
            with pytest.raises(ValueError, match="must not be empty or hold NUL"):
                await sandbox.write_file(path, b"x")

    with_sandbox(backend, use)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_local_paths_stay_in_the_folder(path: str) -> None:
    """Where nothing isolates, a path does not leave the working folder by what it says."""

    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as sandbox:
            with pytest.raises(ValueError, match="working folder"):
                await sandbox.read_file(path)
            with pytest.raises(ValueError, match="working folder"):
                await sandbox.write_file(path, b"x")
        with pytest.raises(ValueError, match="working folder"):
            await factory.start(SandboxSpec(files={path: b"x"}))

    with_factory("local", use)


@isolated
def test_absolute_paths_and_further_folders(backend: Backend) -> None:
    """A path means what it means to the commands; only the writable folders can be written."""
    spec = SandboxSpec(workdir="/app/src", folders=("/logs", "/tests"), files={"in": b"1", "/tests/t": b"2"})

    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "pwd; cat /app/src/in /tests/t; echo 3 > /logs/l")).stdout == "/app/src\n12"
        assert await sandbox.read_file("/logs/l") == b"3\n"
        await sandbox.write_file("/tmp/a/b", b"4")
        assert (await sh(sandbox, "cat ../../tmp/a/b")).stdout == "4"
        for path in ("/usr/x", "/x", "/bin/sh", "/etc/passwd", "/.agentgrad/server"):
            with pytest.raises(OSError, match="cannot be written"):
                await sandbox.write_file(path, b"x")
        assert (await sandbox.read_file("/etc/passwd")).startswith(b"root:")

    with_sandbox(backend, use, spec)


@isolated
def test_a_link_ends_where_the_sandbox_ends(backend: Backend) -> None:
    """D17, D25, in part: what a link names is looked up inside, whoever follows it."""

    async def use(sandbox: Sandbox) -> None:
        links = f"ln -s a in; ln -s {secret} out; ln -s / root; ln -s self self"
        assert (await sh(sandbox, f"echo in > a; {links}")).exit_code == 0
        assert await sandbox.read_file("in") == b"in\n"
        await sandbox.write_file("in", b"new")
        assert (await sh(sandbox, "cat a")).stdout == "new"
        for path in ("out", f"root{secret}", "self"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)

    with tempfile.NamedTemporaryFile(suffix="-secret") as file:
        secret = file.name
        Path(secret).write_text("secret")
        with_sandbox(backend, use)
        assert Path(secret).read_text() == "secret"


@every
def test_what_is_no_plain_file_never_holds_a_call(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "mkfifo pipe; mkdir d; ln -s /dev/zero zero; ln -s /dev/stdin input")).exit_code == 0
        for path in ("pipe", "d", "zero", "input"):
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file(path)
            with pytest.raises(OSError, match="cannot be written"):
                await sandbox.write_file(path, b"x")
        assert (await sh(sandbox, "echo still here")).stdout == "still here\n"

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


@isolated
def test_a_full_disk_is_said_d09(backend: Backend) -> None:
    """D09: every writable folder has its bound; what is full is an error of the write, and room comes back."""
    limits = SandboxLimits(disk_bytes=MIB, max_file_bytes=2 * MIB)

    async def use(sandbox: Sandbox) -> None:
        for folder in (".", "/tmp", "/data"):
            full = await sh(sandbox, f"dd if=/dev/zero of={folder}/big bs=65536 count=30 2>&1")
            assert full.exit_code != 0
            assert "No space left" in full.stdout
            with pytest.raises(OSError, match="No space left"):
                await sandbox.write_file(f"{folder}/more", b"x" * 100_000)
            assert (await sh(sandbox, f"rm {folder}/*; head -c 900000 /dev/zero > {folder}/ok")).exit_code == 0

    with_sandbox(backend, use, SandboxSpec(limits=limits, folders=("/data",)))


@isolated
def test_files_of_the_spec_that_do_not_fit(backend: Backend) -> None:
    """That is the task's fault, so it is the sandbox's error, and nothing is left."""

    async def use(factory: SandboxFactory) -> None:
        spec = SandboxSpec(files={"a": b"x" * (2 * MIB)}, limits=SandboxLimits(disk_bytes=MIB))
        with pytest.raises(SandboxError, match=r"the task's files cannot be written.*No space left"):
            await factory.start(spec)
        with pytest.raises(SandboxError, match="the task's files cannot be written"):
            await factory.start(SandboxSpec(files={"a": b"1", "a/b": b"2"}))

    with_factory(backend, use)


@isolated
def test_the_size_of_one_file_is_limited(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, "dd if=/dev/zero of=big bs=65536 count=80; code=$?; wc -c < big; exit $code")
        assert done.exit_code != 0
        assert int(done.stdout) <= 2 * MIB

    with_sandbox(backend, use, SandboxSpec(limits=SandboxLimits(max_file_bytes=2 * MIB)))
