"""The contract between an environment and the place where its commands run.

A sandbox belongs to one trajectory. What goes wrong in a command is the command's fault and comes back as an
`ExecResult`; what goes wrong in the sandbox is nobody's fault in the conversation and is raised as
`SandboxError`, so that it can never be scored as the policy's mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from envs.types import ExecResult

DEFAULT_IMAGE = "agentgrad-sandbox:1"
"""The image of the Docker sandbox: `bash scripts/build_sandbox_image.sh` makes it without a registry."""


class SandboxError(RuntimeError):
    """The sandbox (not the command) failed. The message says what, where, and what to do."""


class SandboxUnavailableError(SandboxError):
    """No sandbox of this kind can be had on this machine: no daemon, no binary, no permission, no image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one sandbox may use. There is no network, whatever the limits."""

    memory_bytes: int = 256 * 1024 * 1024
    max_processes: int = 64
    max_file_bytes: int = 64 * 1024 * 1024
    cpus: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a task needs from its sandbox: the files that lie in the working folder, and the limits.

    `files` maps a relative path to its content. The working folder is the command's current folder; it is
    writable, and it is gone when the sandbox closes.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    limits: SandboxLimits = field(default_factory=SandboxLimits)


class Sandbox(Protocol):
    """A running sandbox, used as `async with await factory.start(spec) as sandbox`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        max_output_bytes: int = 65536,
    ) -> ExecResult:
        """Run `argv` in the working folder and wait for it.

        A missing program is exit code 127, a file that cannot be executed 126. After `timeout_s` seconds every
        process of the command is killed and `timed_out` is set. stdin ends at once unless given. At most
        `max_output_bytes` of each of stdout and stderr are kept.

        Raises:
            SandboxError: the sandbox is closed, gone, or could not start the command.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """The content of a file, `path` relative to the working folder.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the path leaves the working folder.
            SandboxError: the sandbox is closed or gone.
        """
        ...

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file, `path` relative to the working folder; missing folders are made. Errors as above."""
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
        """A new, empty sandbox that holds the files of `spec`.

        Raises:
            SandboxError: it could not be started.
        """
        ...

    async def close(self) -> None:
        """Release what the factory holds. Sandboxes that are still open are closed too."""
        ...


def relative_path(path: str) -> str:
    """`path`, when it stays inside the working folder; `ValueError` otherwise.

    >>> relative_path("notes/a.txt")
    'notes/a.txt'
    """
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"path {path!r} must be relative and stay inside the working folder")
    return path
