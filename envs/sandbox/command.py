"""What every sandbox does in the same way: check a command, keep the head of its output, read and write files, close.

A back-end says how one command runs (`_run`) and how everything is released (`_release`); the rest is here. Files are
read and written by a command inside the sandbox, never by this process from outside, because the files there are the
policy's: a symbolic link to a secret of the host must end where the sandbox ends.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from envs.sandbox.base import SandboxError, SandboxLimits, relative_path
from envs.types import ExecResult

# No pager, editor or prompt may wait for a person who is not there.
COMMAND_ENVIRONMENT: Mapping[str, str] = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
}

# More output than this on one stream is a flood: the command is ended. Up to here, what is past the caller's limit is
# read and thrown away, so that a verbose command still ends by itself with its own exit code.
FLOOD_BYTES = 16 * 1024 * 1024

# What Linux takes as one argument, and safely as all of them; longer ones get the shell's usual answer everywhere.
MAX_ARGUMENT_BYTES = 128 * 1024 - 1
MAX_ARGUMENTS_BYTES = 1024 * 1024

TIMEOUT_EXIT_CODE = 124
KILLED_EXIT_CODE = 128 + 9

FILE_TIMEOUT_S = 30.0
_MISSING, _OUTSIDE, _NOT_A_FILE = 44, 45, 46

_READ_SCRIPT = f"""
root=$(pwd -P)
real=$(readlink -f -- "$1") || exit {_MISSING}
case "$real" in "$root"/*) ;; *) exit {_OUTSIDE} ;; esac
[ -f "$1" ] || exit {_MISSING}
exec cat -- "$1"
"""

_WRITE_SCRIPT = f"""
root=$(pwd -P)
mkdir -p -- "$(dirname -- "$1")" || exit 1
real=$(readlink -f -- "$1") || exit 1
case "$real" in "$root"/*) ;; *) exit {_OUTSIDE} ;; esac
if [ -e "$1" ] && [ ! -f "$1" ]; then exit {_NOT_A_FILE}; fi
exec cat > "$1"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResult:
    """An `ExecResult` whose output is still bytes, before the limits of text are applied."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    oom_killed: bool = False
    output_truncated: bool = False


class Capture:
    """The first `max_bytes` of a stream; what comes later is counted and thrown away."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = bytearray()
        self.total_bytes = 0

    def add(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._max_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]

    @property
    def content(self) -> bytes:
        return bytes(self._head)

    @property
    def truncated(self) -> bool:
        return self.total_bytes > self._max_bytes

    @property
    def flooded(self) -> bool:
        return self.total_bytes > max(FLOOD_BYTES, self._max_bytes)


class CommandSandbox(ABC):
    """The `Sandbox` protocol on top of one primitive, `_run`. `name` is what messages call this sandbox."""

    def __init__(self, name: str, limits: SandboxLimits) -> None:
        self.name = name
        self._limits = limits
        self._closed = False
        self._running: set[asyncio.Task[RawResult]] = set()

    @abstractmethod
    async def _run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes, max_output_bytes: int) -> RawResult:
        """Run a checked command; when it is late or cancelled, end every process of it before that is told."""

    @abstractmethod
    async def _release(self) -> None:
        """End every process and remove everything. Called once."""

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_output_bytes: int = 65536
    ) -> ExecResult:
        """See `Sandbox.exec`.

        A command that writes more than `FLOOD_BYTES` to one stream is killed: exit code 137, `output_truncated`.

        Raises:
            ValueError: `argv` is empty or holds a NUL, which no program can be given.
        """
        started = time.perf_counter()
        argv = checked_argv(argv)
        if _too_long(argv):
            self._check_open()
            return ExecResult(exit_code=126, stdout="", stderr="argument list too long\n")
        done = await self._owned(argv, timeout_s, stdin, max_output_bytes)
        return ExecResult(
            exit_code=TIMEOUT_EXIT_CODE if done.timed_out else done.exit_code,
            stdout=_text(done.stdout, max_output_bytes),
            stderr=_text(done.stderr, max_output_bytes),
            timed_out=done.timed_out,
            oom_killed=done.oom_killed,
            output_truncated=done.output_truncated,
            duration_s=time.perf_counter() - started,
        )

    async def read_file(self, path: str) -> bytes:
        """See `Sandbox.read_file`. A file that the sandbox's own user cannot read counts as missing.

        Raises:
            ValueError: also when the file is larger than the limit `max_file_bytes`.
        """
        done = await self._file_command(_READ_SCRIPT, path, b"", self._limits.max_file_bytes)
        if done.exit_code != 0:
            raise FileNotFoundError(f"{self.name}: no file {path!r} to read in the working folder{_reason(done)}")
        if done.output_truncated:
            raise ValueError(f"{self.name}: {path!r} is larger than {self._limits.max_file_bytes} bytes")
        return done.stdout

    async def write_file(self, path: str, content: bytes) -> None:
        """See `Sandbox.write_file`.

        Raises:
            OSError: the file cannot be written, because the disk is full or a folder is in the way.
        """
        done = await self._file_command(_WRITE_SCRIPT, path, content, 4096)
        if done.exit_code != 0:
            raise OSError(f"{self.name}: {path!r} cannot be written{_reason(done)}")

    async def _file_command(self, script: str, path: str, stdin: bytes, max_output_bytes: int) -> RawResult:
        argv = checked_argv(["sh", "-c", script, "sh", "./" + relative_path(path)])
        done = await self._owned(argv, FILE_TIMEOUT_S, stdin, max_output_bytes)
        if done.timed_out:
            raise SandboxError(f"{self.name}: {path!r} was not read or written within {FILE_TIMEOUT_S:.0f} s")
        if done.exit_code == _OUTSIDE:
            raise ValueError(f"path {path!r} is a link that leaves the working folder")
        return done

    async def _owned(self, argv: Sequence[str], timeout_s: float, stdin: bytes, max_output_bytes: int) -> RawResult:
        """`_run`, as a task that `close` can end."""
        self._check_open()
        running = asyncio.ensure_future(
            self._run(argv, timeout_s=timeout_s, stdin=stdin, max_output_bytes=max_output_bytes)
        )
        self._running.add(running)
        try:
            return await running
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise SandboxError(f"{self.name}: the sandbox was closed while a command ran") from None
            raise
        finally:
            self._running.discard(running)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(f"{self.name}: the sandbox is closed; start a new one")

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """End every process and remove everything. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def checked_argv(argv: Sequence[str]) -> list[str]:
    """`argv` as the operating system can take it: lone surrogates, which JSON may hold, become question marks.

    >>> checked_argv(["echo", "a\\ud800"])
    ['echo', 'a?']
    """
    if not argv or not argv[0]:
        raise ValueError("argv must name a program")
    if any("\0" in argument for argument in argv):
        raise ValueError("argv must not hold NUL characters: replace them first")
    return [argument.encode("utf-8", "replace").decode("utf-8") for argument in argv]


def _too_long(argv: Sequence[str]) -> bool:
    sizes = [len(argument.encode()) for argument in argv]
    return max(sizes) > MAX_ARGUMENT_BYTES or sum(sizes) > MAX_ARGUMENTS_BYTES


def _text(data: bytes, max_output_bytes: int) -> str:
    # A character that the limit cut in two is left out; bytes that are no UTF-8 are replaced.
    cut = len(data) >= max_output_bytes
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not cut)


def _reason(done: RawResult) -> str:
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
