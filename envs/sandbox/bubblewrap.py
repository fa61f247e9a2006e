"""The embedded sandbox: the server is process 1 of namespaces that `bwrap` makes; no daemon, and no image needed.

Commands see the machine's /usr read-only (or an unpacked root file system), their own writable folders in memory, and
nothing else of the machine: no network, no home folders, no secrets of /etc, no process but their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from envs.sandbox import wire
from envs.sandbox.base import DEFAULT_IMAGE, SandboxError, SandboxSpec, SandboxUnavailableError
from envs.sandbox.build_server import cache_folder, server_program
from envs.sandbox.cgroup import Cgroup, Cgroups, entering
from envs.sandbox.launch import (
    PROXY_PORT,
    SERVER,
    START_S,
    Launched,
    folder_bytes,
    must_answer,
    proxy_variables,
    read_exactly,
    shared_memory_bytes,
    version_of,
    wait_for_exit,
)
from envs.sandbox.rootfs import unpack_rootfs

NOBODY = 65534
ROOT_CACHE = Path("/var/cache/agentgrad-rootfs")
END_S = 5.0
HELLO_BYTES = len(wire.frame(wire.HELLO, 0, bytes(4)))

NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--as-pid-1"),
    *("--hostname", "sandbox", "--cap-drop", "ALL"),
)
# Programs and libraries are reached through these; whatever else lies in /etc stays out.
VISIBLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
ETC = {
    "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nnobody:x:{NOBODY}:{NOBODY}:nobody:/app:/bin/sh\n",
    "/etc/group": f"root:x:0:\nnogroup:x:{NOBODY}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
# What in the kernel keeps an ordinary user from making namespaces: the setting, the value that does, one that does not.
SWITCHES = (
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "15000"),
)


class _BubblewrapLaunched:
    """One `bwrap` process, its namespaces, and its group."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connected: socket.socket,
        variables: Mapping[str, str],
        info: int,
        said: int,
        group: Cgroup | None,
    ) -> None:
        self.name = f"bubblewrap-{uuid.uuid4().hex}"
        self.connected = connected
        self.variables = variables
        self._process = process
        self._info = info
        self._said = said
        self._files = [info, said]
        self._group = group
        self._ending: asyncio.Future[None] | None = None

    async def end(self) -> None:
        if self._ending is None or (self._ending.done() and self._ending.exception() is not None):
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self.connected.close()
        if not await wait_for_exit(self._process, END_S):
            # The server should have ended with its channel. Ending the first process inside ends all of them.
            self._kill()
            if not await wait_for_exit(self._process, END_S):
                raise SandboxError(f"bubblewrap: process {self._process.pid} cannot be killed")
        while self._files:
            os.close(self._files.pop())
        if self._group is not None and not await asyncio.to_thread(self._group.remove):
            raise SandboxError(f"bubblewrap: the control group {self._group.folders[0]} cannot be removed")

    def _kill(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.kill(json.loads(os.pread(self._info, 4096, 0))["child-pid"], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def why_gone(self) -> str:
        if self._ending is None and await wait_for_exit(self._process, END_S):
            return f"bwrap ended with {self._process.returncode}{self.last_words()}"
        return "its process was killed from outside, or it ran out of memory"

    def last_words(self) -> str:
        text = os.pread(self._said, 4096, 0).decode("utf-8", "replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""


class BubblewrapLauncher:
    """Starts sandboxes with bwrap."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self._cgroups = Cgroups.find()
        self._roots: dict[tuple[str, ...], Path] = {}
        self._owner = NOBODY if os.geteuid() == 0 else None

    async def check(self, spec: SandboxSpec) -> None:
        _refuse(spec)
        launched = None
        try:
            launched = await self.launch(spec)
        except SandboxUnavailableError:
            raise
        except SandboxError as error:
            raise SandboxUnavailableError(_why_blocked(error)) from error
        finally:
            if launched is not None:
                await launched.end()

    async def prepare(self, spec: SandboxSpec) -> None:
        _refuse(spec)
        await asyncio.to_thread(server_program)
        await asyncio.to_thread(self._root, spec.image)

    async def launch(self, spec: SandboxSpec) -> Launched:
        _refuse(spec)
        programs = [*_programs(self._owner), *NAMESPACES]
        server = await asyncio.to_thread(server_program)
        root = await asyncio.to_thread(self._root, spec.image)
        group = None
        try:
            group = None if self._cgroups is None else self._cgroups.make(spec.limits)
            launched = self._spawn(spec, programs, server, root, group)
        except OSError as error:
            if group is not None:
                group.remove()
            raise SandboxError(f"bubblewrap: a sandbox with these limits cannot be made: {error}") from error
        try:
            launched.connected.setblocking(False)
            async with asyncio.timeout(START_S):
                must_answer(await read_exactly(launched.connected, HELLO_BYTES), "bubblewrap")
        except (SandboxError, OSError, TimeoutError) as error:
            await wait_for_exit(launched._process, END_S)
            words = launched.last_words()
            await launched.end()
            raise SandboxError(f"bubblewrap: bwrap could not start a sandbox{words or f': {error}'}") from error
        except BaseException:
            await launched.end()
            raise
        return launched

    def _root(self, image: str | None) -> Path | None:
        """The unpacked root file system, None for the machine's own; blocking, and long the first time."""
        if image in (None, DEFAULT_IMAGE):
            return None
        version = version_of(image)
        if version not in self._roots:
            self._roots[version] = unpack_rootfs(Path(image), _rootfs_folder())
        return self._roots[version]

    def _spawn(
        self, spec: SandboxSpec, programs: list[str], server: Path, root: Path | None, group: Cgroup | None
    ) -> _BubblewrapLaunched:
        with ExitStack() as opened, ExitStack() as kept:
            ours, theirs = socket.socketpair()
            kept.callback(ours.close)
            opened.callback(theirs.close)
            info, said = os.memfd_create("info"), os.memfd_create("stderr")
            kept.callback(os.close, info)
            kept.callback(os.close, said)
            passed: list[int] = [info]

            def pass_on(fd: int) -> str:
                opened.callback(os.close, fd)
                passed.append(fd)
                return str(fd)

            data = {path: pass_on(_memory(text)) for path, text in ETC.items()}
            oom = "-1" if group is None else pass_on(os.open(group.oom_file, os.O_RDONLY | os.O_CLOEXEC))
            program = pass_on(os.open(server, os.O_RDONLY | os.O_CLOEXEC))
            inside = [*_mounts(spec, root, data), *_last_mounts(spec, program), *_user(spec)]
            command = [*programs, *inside, "--info-fd", str(info), "--", SERVER, *_server_arguments(spec, group, oom)]
            process = subprocess.Popen(
                entering(group, command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=said,
                pass_fds=passed,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
            kept.pop_all()
        return _BubblewrapLaunched(process, ours, proxy_variables(spec), info, said, group)

    async def reap(self) -> int:
        return 0 if self._cgroups is None else await asyncio.to_thread(self._cgroups.reap)

    async def end_foreign(self, name: str) -> None:
        """Nothing to do: it ends with its channel, and its group is reaped."""

    async def close(self) -> None:
        pass


def _rootfs_folder() -> Path:
    """Where root file systems are unpacked: bwrap, which root starts as nobody, must be able to go there."""
    if os.geteuid() != 0:
        return cache_folder() / "rootfs"
    ROOT_CACHE.mkdir(parents=True, exist_ok=True)
    ROOT_CACHE.chmod(0o711)
    return ROOT_CACHE


def _refuse(spec: SandboxSpec) -> None:
    if spec.writable_root:
        raise SandboxUnavailableError("bubblewrap: the root file system is always read-only here; use docker")
    if spec.image not in (None, DEFAULT_IMAGE) and not str(spec.image).startswith(("/", "./", "../")):
        raise SandboxUnavailableError(
            f"bubblewrap: there is no registry for {spec.image}: give the path of a root file system archive, or use "
            "docker"
        )


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


def _mounts(spec: SandboxSpec, root: Path | None, data: Mapping[str, str]) -> Iterator[str]:
    """What of the machine, or of the root file system, is seen: everything read-only."""
    places = [Path(place) for place in VISIBLE] if root is None else sorted(root.iterdir())
    hidden = {"/proc", "/dev", "/sys", "/tmp", spec.workdir, *spec.folders}
    for place in places:
        inside = str(place) if root is None else f"/{place.name}"
        if inside in hidden:
            continue
        if place.is_symlink():
            yield from ("--symlink", str(place.readlink()), inside)
        elif place.exists():
            yield from ("--ro-bind", str(place), inside)
    if root is None:
        yield from ("--perms", "0755", "--dir", "/etc")
    for path, fd in data.items():
        if root is None or not (root / path[1:]).exists():
            yield from ("--perms", "0644", "--ro-bind-data", fd, path)


def _last_mounts(spec: SandboxSpec, program: str) -> Iterator[str]:
    """The kernel's folders, the server, and what can be written: the working folder, /tmp, /dev/shm and the spec's."""
    yield from ("--proc", "/proc", "--dev", "/dev")
    shared = str(shared_memory_bytes(spec.limits))
    yield from ("--size", shared, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    folders = dict.fromkeys(("/tmp", spec.workdir, *spec.folders))
    for folder in folders:
        size = str(folder_bytes(spec.limits, len(folders)))
        yield from ("--size", size, "--perms", "1777", "--tmpfs", folder)
    yield from ("--perms", "0755", "--ro-bind-data", program, SERVER)
    yield from ("--chdir", spec.workdir, "--remount-ro", "/")


def _user(spec: SandboxSpec) -> list[str]:
    user = "0" if spec.user == "root" else str(NOBODY)
    return ["--uid", user, "--gid", user]


def _server_arguments(spec: SandboxSpec, group: Cgroup | None, oom_fd: str) -> list[str]:
    limits = spec.limits
    # Without a group, the limits that one process can have for itself.
    processes, memory = (0, 0) if group is not None else (limits.max_processes + 2, limits.memory_bytes)
    port = 0 if spec.network == "none" else PROXY_PORT
    return [str(limits.max_file_bytes), str(processes), str(memory), oom_fd, str(port)]


def _memory(text: str) -> int:
    fd = os.memfd_create("data")
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _why_blocked(error: SandboxError) -> str:
    text = str(error).removeprefix("bubblewrap: ")
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
