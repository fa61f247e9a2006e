"""The contract between an environment and the place where its commands run.

A sandbox belongs to one trajectory. What goes wrong in a command is the command's fault and comes back as an
`ExecResult`; what goes wrong in the sandbox is nobody's fault in the conversation and is raised as
`SandboxError`, so that it can never be scored as the policy's mistake.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self, get_args

from envs.types import ExecResult

DEFAULT_IMAGE = "agentgrad-sandbox:1"
"""The image of the Docker sandbox: `bash scripts/build_sandbox_image.sh` makes it without a registry."""

MIB = 1024 * 1024
_FOLDER = re.compile(r"/[^/\0:][^\0:]{0,253}")
_KERNELS_OWN = frozenset({"proc", "sys", "dev", ".agentgrad"})
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|[0-9A-Fa-f:.]+")
MAX_OUTPUT_BYTES = 64 * 1024
"""Of each of stdout and stderr, what a result keeps unless the caller says otherwise."""

MIN_MEMORY_BYTES = 8 * MIB
"""With less, neither a container engine nor a shell starts."""

Network = Literal["none", "allowlist", "public"]
User = Literal["nobody", "root"]


class SandboxError(RuntimeError):
    """The sandbox (not the command) failed. The message says what, where, and what to do."""


class SandboxUnavailableError(SandboxError):
    """No sandbox of this kind can be had on this machine: no daemon, no binary, no permission, no image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one sandbox may use, all its commands together. envs/README.md says which back-end enforces what."""

    memory_bytes: int = 256 * MIB
    max_processes: int = 64
    max_file_bytes: int = 64 * MIB
    disk_bytes: int = 64 * MIB
    """Of each writable folder (the working folder, /tmp, `SandboxSpec.folders`). It lies in memory, so it is less where
    `memory_bytes` would not leave enough for processes (`envs.sandbox.launch.folder_bytes`)."""
    cpus: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"sandbox limit {name} must be a number above 0, not {value}")
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise ValueError(
                f"sandbox limit memory_bytes must be at least {MIN_MEMORY_BYTES} (8 MiB), not {self.memory_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFile:
    """A file with its mode, where 0o644 is not right."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a task needs from its sandbox.

    `files` maps a path to its content; a relative one lies in `workdir`, the commands' current folder. `folders` are
    further absolute folders that can be written. All of them are gone when the sandbox closes.

    The defaults are the safe ones. A task that needs more declares it, and `relaxed` says so in its record: `user`,
    `writable_root` (the image's whole tree can be written), `network` (`allowlist`: HTTP and HTTPS to `allowed_hosts`
    through a proxy that the variables http_proxy and https_proxy name; `public`: to every public host).
    """

    files: Mapping[str, bytes | SandboxFile] = field(default_factory=dict)
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    image: str | None = None
    """None: the one that the factory was opened with. bubblewrap has the machine's own programs instead."""
    workdir: str = "/app"
    folders: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: User = "nobody"
    writable_root: bool = False
    network: Network = "none"
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for folder in (self.workdir, *self.folders):
            if not _FOLDER.fullmatch(folder) or posixpath.normpath(folder) != folder:
                raise ValueError(f"sandbox folder {folder!r} must be a plain absolute path such as /app, and not /")
            if folder.split("/")[1] in _KERNELS_OWN:
                raise ValueError(f"sandbox folder {folder!r} lies where the system has its own; use one such as /app")
        check_variables(self.env)
        if self.image == "":
            raise ValueError("a sandbox's image must not be empty; leave it out for the default one")
        if self.user not in get_args(User) or self.network not in get_args(Network):
            users, networks = ", ".join(get_args(User)), ", ".join(get_args(Network))
            raise ValueError(
                f"a sandbox has user {self.user!r} and network {self.network!r}; users: {users}; networks: {networks}"
            )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"allowed host {host!r} must be a name such as example.org or *.example.org")
        if (self.network == "allowlist") != bool(self.allowed_hosts):
            raise ValueError("allowed_hosts go with network 'allowlist', and with nothing else")

    @property
    def relaxed(self) -> tuple[str, ...]:
        """What is weaker than the defaults, in words; empty for a sandbox with all of them.

        >>> SandboxSpec(user="root", network="allowlist", allowed_hosts=("example.org",)).relaxed
        ('user root', 'network to example.org')
        """
        hosts = ", ".join(self.allowed_hosts) or "every public host"
        reasons = [
            ("user root", self.user == "root"),
            ("writable root file system", self.writable_root),
            (f"network to {hosts}", self.network != "none"),
        ]
        return tuple(text for text, applies in reasons if applies)


class Shell(Protocol):
    """A shell session: the current folder and the exported variables of one command are there for the next.

    Each command is a process of its own, so one that is late or killed loses its own changes and nothing else, and so
    does one that sets a trap on EXIT or replaces the shell (`exec`). What is not exported (functions, aliases, plain
    variables) does not last. After `Sandbox.reset` the session begins anew.
    """

    async def run(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = MAX_OUTPUT_BYTES
    ) -> ExecResult:
        """Run a command line; errors as `Sandbox.exec`."""
        ...


class Sandbox(Protocol):
    """A running sandbox, used as `async with await factory.start(spec) as sandbox`."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Run a program with its arguments, or a command line in `sh -c`, and wait for it.

        A missing program is exit code 127, a file that cannot be executed 126. After `timeout_s` seconds every
        process of the command is killed, whatever session or parent it took, and `timed_out` is set. stdin ends at
        once unless given. Of each of stdout and stderr at most `max_output_bytes` are kept, one half from the
        beginning and one from the end, with a line between them that says how much was cut. What a command leaves
        running in the background does not hold the call, and lives until the sandbox closes.

        Args:
            cwd: the current folder, relative to the working folder or absolute.
            env: variables on top of the sandbox's own.

        Raises:
            SandboxError: the sandbox is closed, gone, or could not start the command.
            ValueError: no program is named, or an argument holds a NUL.
        """
        ...

    def shell(self, program: str = "sh") -> Shell:
        """A new shell session that starts in the working folder; `program` is a POSIX shell of the sandbox."""
        ...

    async def read_file(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The content of a file, `path` relative to the working folder or absolute.

        Raises:
            FileNotFoundError: there is no such file, it is no plain file, or the sandbox's user may not read it.
            ValueError: it is larger than `max_bytes` (the limit `max_file_bytes` unless given).
            SandboxError: the sandbox is closed or gone.
        """
        ...

    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file; missing folders are made. A link is followed, inside the sandbox.

        Raises:
            OSError: it cannot be written: no space, read-only, a folder is in the way.
            SandboxError: the sandbox is closed or gone.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes | SandboxFile]) -> None:
        """Write several files, with their folders and modes; errors as `write_file`."""
        ...

    async def kill_all(self) -> int:
        """Kill every process of the sandbox but its own server, and say how many there were. Files stay.

        Raises:
            SandboxError: something could not be killed, or the sandbox is closed or gone.
        """
        ...

    async def reset(self) -> None:
        """Back to the beginning: a new sandbox takes this one's place, with the files of the spec and nothing else.

        Raises:
            SandboxError: no new one could be started.
        """
        ...

    async def close(self) -> None:
        """End every process and remove everything. Safe to call twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SandboxFactory(Protocol):
    """Starts sandboxes of one kind. `name` is what logs and reports call it."""

    name: str

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox that holds the files of `spec`.

        Raises:
            SandboxError: it could not be started.
            SandboxUnavailableError: it never can be here: the image is missing, or `spec` asks for what this kind of
                sandbox cannot give.
        """
        ...

    async def close(self) -> None:
        """Release what the factory holds. Sandboxes that are still open are closed too."""
        ...


def check_variables(variables: Mapping[str, str]) -> None:
    """Raises `ValueError` for what no program can be given as a variable."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"variable {name!r} must have a name without '=', and no NUL in name or value")


def with_mode(file: bytes | SandboxFile) -> SandboxFile:
    """`file` with the mode it gets."""
    return SandboxFile(content=file) if isinstance(file, bytes) else file
