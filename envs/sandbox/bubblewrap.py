"""The embedded sandbox: each command is one `bwrap` run in namespaces of its own; no daemon, no image.

A command sees the machine's /usr read-only, its own /work and /tmp, and nothing else of the machine: no network, no
home folders, no secrets of /etc, no process but its own. What it leaves running ends when it ends, because the process
namespace ends with it. What bwrap alone cannot do: limit the memory, the processors or the disk of a sandbox as a
whole, and see that a process ran out of memory (`oom_killed` is always False); memory is limited for each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from envs.sandbox.base import SandboxError, SandboxSpec, SandboxUnavailableError
from envs.sandbox.command import COMMAND_ENVIRONMENT, KILLED_EXIT_CODE, CommandSandbox, RawResult
from envs.sandbox.factory import CommandFactory
from envs.sandbox.folder import make_folder, remove_folder
from envs.sandbox.process import run_process

NOBODY = 65534
SHARED_MEMORY_BYTES = 16 * 1024 * 1024
SELF_TEST_S = 10.0
ENVIRONMENT = {**COMMAND_ENVIRONMENT, "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/work"}

NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
    *("--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--cap-drop", "ALL"),
)
# Programs and libraries are reached through these; whatever else lies in /etc stays out.
VISIBLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
ETC = {
    "passwd": f"root:x:0:0:root:/:/bin/sh\nnobody:x:{NOBODY}:{NOBODY}:nobody:/work:/bin/sh\n",
    "group": f"root:x:0:\nnogroup:x:{NOBODY}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
# What in the kernel keeps an ordinary user from making namespaces: the setting, the value that does, one that does not.
SWITCHES = (
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "15000"),
)


class BubblewrapSandbox(CommandSandbox):
    """One working folder on the machine's disk, bound to /work; `launcher` is the command line up to the limits."""

    def __init__(self, folder: Path, spec: SandboxSpec, launcher: Sequence[str]) -> None:
        super().__init__("bubblewrap", spec.limits)
        self._folder = folder
        self._launcher = launcher

    async def _run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes, max_output_bytes: int) -> RawResult:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        status = bytearray()

        def read_status() -> None:
            with contextlib.suppress(BlockingIOError):
                status.extend(os.read(reader, 4096))

        def kill(_pid: int) -> None:
            # Ending the first process inside, and not bwrap, makes bwrap reap it; so when bwrap has ended, all of
            # the process namespace has.
            read_status()
            child = _status_value(status, "child-pid")
            if child is not None:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.kill(child, signal.SIGKILL)

        try:
            done = await run_process(
                [*self._launcher, *self._inside(writer), *argv],
                cwd=Path("/"),
                environment=ENVIRONMENT,
                timeout_s=timeout_s,
                stdin=stdin,
                max_output_bytes=max_output_bytes,
                pass_fds=(writer,),
                kill=kill,
            )
            read_status()
        finally:
            os.close(reader)
            os.close(writer)
        killed = done.timed_out or done.exit_code in (KILLED_EXIT_CODE, 126)
        if not killed and _status_value(status, "exit-code") is None:
            raise SandboxError(f"bwrap could not start the command: {done.stderr.decode('utf-8', 'replace').strip()}")
        return done

    def _inside(self, status_fd: int) -> list[str]:
        limits = self._limits
        return [
            *("--size", str(limits.max_file_bytes), "--tmpfs", "/tmp"),
            *("--bind", str(self._folder), "/work", "--chdir", "/work", "--remount-ro", "/"),
            *("--json-status-fd", str(status_fd), "--"),
            # Set here and not outside, so that the processes are counted for this namespace alone.
            *("prlimit", f"--nproc={limits.max_processes}", f"--as={limits.memory_bytes}"),
            *(f"--fsize={limits.max_file_bytes}", "--core=0", "--"),
        ]

    async def _release(self) -> None:
        await asyncio.to_thread(remove_folder, self._folder)


class BubblewrapFactory(CommandFactory):
    """Starts `BubblewrapSandbox`es; made by `create`."""

    name = "bubblewrap"

    def __init__(self, folder: Path, launcher: Sequence[str], owner: int | None) -> None:
        super().__init__()
        self.folder = folder
        self._launcher = launcher
        self._owner = owner

    @classmethod
    async def create(cls) -> Self:
        """A factory whose self-test has run one command.

        Raises:
            SandboxUnavailableError: bwrap is missing or may not make namespaces; one line says what helps.
        """
        owner = NOBODY if os.geteuid() == 0 else None
        launcher = [*_programs(owner), *NAMESPACES]
        folder = await asyncio.to_thread(_make_root, owner)
        factory = cls(folder, [*launcher, *_mounts(folder)], owner)
        try:
            async with await factory.start(SandboxSpec()) as sandbox:
                done = await sandbox.exec(["sh", "-c", "command -v prlimit readlink cat"], timeout_s=SELF_TEST_S)
            if done.exit_code != 0:
                raise SandboxError(f"the self-test ended with {done.exit_code}: {done.stderr.strip()}")
        except BaseException as error:
            await factory.close()
            if isinstance(error, SandboxError):
                raise SandboxUnavailableError(_why_blocked(error)) from error
            raise
        return factory

    async def _start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        folder = await asyncio.to_thread(make_folder, self.folder, spec.files, self._owner)
        return BubblewrapSandbox(folder, spec, self._launcher)

    async def _release(self) -> None:
        await asyncio.to_thread(remove_folder, self.folder)


def _programs(owner: int | None) -> list[str]:
    """The start of the command line: bwrap, behind setpriv when this process is root.

    Root's processes escape the limit on processes, and a sandbox must not be root outside either.
    """
    if shutil.which("bwrap") is None:
        raise SandboxUnavailableError("bubblewrap: bwrap is not installed: run apt-get install bubblewrap")
    if owner is None:
        return ["bwrap"]
    if shutil.which("setpriv") is None:
        raise SandboxUnavailableError("bubblewrap: setpriv is not installed: run apt-get install util-linux")
    return ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups", "--", "bwrap"]


def _make_root(owner: int | None) -> Path:
    """The factory's folder: the sandboxes' working folders, and the few files of /etc that they share."""
    folder = Path(tempfile.mkdtemp(prefix="agentgrad-bubblewrap-"))
    (folder / "etc").mkdir()
    for name, content in ETC.items():
        (folder / "etc" / name).write_text(content)
    if owner is not None:
        folder.chmod(0o711)
    return folder


def _mounts(folder: Path) -> list[str]:
    """What of the machine is seen. Everything is read-only; only /work, /tmp and /dev/shm can be written."""
    mounts: list[str] = []
    for place in map(Path, VISIBLE):
        if place.is_symlink():
            mounts += ["--symlink", str(place.readlink()), str(place)]
        elif place.exists():
            mounts += ["--ro-bind", str(place), str(place)]
    for name in ETC:
        mounts += ["--ro-bind", str(folder / "etc" / name), f"/etc/{name}"]
    mounts += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    return [*mounts, "--remount-ro", "/dev"]


def _why_blocked(error: SandboxError) -> str:
    text = str(error)
    for name, blocked, works in SWITCHES:
        switch = Path("/proc/sys", *name.split("."))
        if switch.exists() and switch.read_text().strip() == blocked:
            return f"bubblewrap: user namespaces are blocked: run sudo sysctl -w {name}={works} ({text})"
    if "namespace" in text or "Operation not permitted" in text:
        return (
            "bubblewrap: user namespaces are blocked, as in most containers: start the container with --privileged, or "
            f"start a Docker daemon ({text})"
        )
    return f"bubblewrap: {text} (version 0.8 or later is needed: apt-get install bubblewrap)"


def _status_value(status: bytearray, key: str) -> int | None:
    """A number from bwrap's status lines, JSON objects such as `{ "child-pid": 7 }`; the last line may be cut."""
    for line in status.splitlines():
        try:
            value = json.loads(line).get(key)
        except json.JSONDecodeError:
            continue
        if isinstance(value, int):
            return value
    return None
