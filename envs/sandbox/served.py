"""The `Sandbox` contract on top of a channel to the server inside: the same for every back-end.

Files are read and written by the server inside the sandbox, never by this process from outside, because the files there
are the policy's: a symbolic link to a secret of the host must end where the sandbox ends.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from envs.sandbox import wire
from envs.sandbox.base import MAX_OUTPUT_BYTES, SandboxError, SandboxFile, SandboxSpec, check_variables, with_mode
from envs.sandbox.channel import Channel
from envs.sandbox.shell import ShellSession
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
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

MAX_PATH_BYTES = 4096
MAX_ARGUMENTS_BYTES = 1024 * 1024
"""Of a command line and its variables; Linux itself takes 128 KiB in one argument, and more than this in all."""
TIMEOUT_EXIT_CODE = 124
KILLED_EXIT_CODE = 128 + 9
CANNOT_RUN_EXIT_CODE = 126
CLOSED_WHILE = "the sandbox was closed while it was in use"

# What keeps a file from being read that is not the file's, or the path's, own doing.
_OUR_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

T = TypeVar("T")


class Lease(Protocol):
    """What keeps one sandbox: a container, a process, a folder."""

    async def release(self) -> None:
        """Return when nothing of it is left. Called once.

        Raises:
            SandboxError: something is left.
        """
        ...

    async def why_gone(self) -> str:
        """What is known of how it ended by itself, in a few words."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running sandbox as a back-end hands it over. `variables` are those of its image; `server` is the path of the
    server program as commands see it."""

    channel: Channel
    lease: Lease
    variables: Mapping[str, str]
    server: str


Start = Callable[[SandboxSpec], Awaitable[Started]]


class ServedSandbox:
    """One sandbox. `confined` refuses paths that leave the working folder, where nothing else keeps them inside."""

    def __init__(self, name: str, spec: SandboxSpec, start: Start, started: Started, *, confined: bool) -> None:
        self.name = name
        self.spec = spec
        self._start = start
        self._started = started
        self._confined = confined
        self._closed = False
        self.resets = 0

    @classmethod
    async def open(cls, name: str, spec: SandboxSpec, start: Start, *, confined: bool = False) -> Self:
        """Start a sandbox and write the files of the spec; nothing is left when that fails."""
        sandbox = cls(name, spec, start, await start(spec), confined=confined)
        try:
            await sandbox._write_spec()
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def _write_spec(self) -> None:
        try:
            await self.write_files(self.spec.files)
        except OSError as error:
            raise SandboxError(f"{self.name}: the task's files cannot be written: {error}") from error

    # --- commands ---

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
        """See `Sandbox.exec`. A command that writes more than 64 MiB to one stream is killed (137)."""
        argv = ["sh", "-c", command] if isinstance(command, str) else command
        env = env or {}
        check_variables(env)
        done, _ = await self.run(
            checked_argv(argv),
            timeout_s=timeout_s,
            cwd=self._cwd(cwd),
            variables={**self.variables, **env},
            stdin=stdin,
            max_output_bytes=max_output_bytes,
        )
        return done

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str,
        variables: Mapping[str, str],
        stdin: bytes,
        max_output_bytes: int,
        wants_state: bool = False,
    ) -> tuple[ExecResult, bytes]:
        """A checked command with all of its variables; also the state that a shell session left on descriptor 9."""
        started = time.perf_counter()
        self._check_open()
        texts = [_plain(f"{name}={value}") for name, value in variables.items()]
        # Each has its end and a pointer to it, too.
        if sum(len(text.encode()) + 9 for text in (*argv, *texts)) > MAX_ARGUMENTS_BYTES:
            return ExecResult(exit_code=CANNOT_RUN_EXIT_CODE, stdout="", stderr="argument list too long\n"), b""

        async def once() -> wire.Exit:
            return await self._started.channel.execute(
                argv,
                timeout_s=timeout_s,
                cwd=cwd,
                variables=texts,
                stdin=stdin,
                wants_state=wants_state,
                max_output_bytes=max_output_bytes,
            )

        done = await self._ask(once())
        if done.no_process:
            # What earlier commands left running has used up the processes. That is no fault of the sandbox's, and
            # must not be raised as one: the leftovers are killed.
            await self._ask(self._started.channel.kill_all(only_background=True))
            done = await self._ask(once())
        if done.start_error and not done.no_process:
            raise SandboxError(f"{self.name}: no command can be started: {os.strerror(done.start_error)}")
        return _result(done, time.perf_counter() - started), done.state

    def shell(self, program: str = "sh") -> ShellSession:
        """See `Sandbox.shell`."""
        return ShellSession(self, program, self._started.server)

    @property
    def variables(self) -> Mapping[str, str]:
        """What a command's environment holds unless it is told more."""
        home = "/root" if self.spec.user == "root" else self.spec.workdir
        return {"PATH": DEFAULT_PATH, "HOME": home, **self._started.variables, **COMMAND_ENVIRONMENT, **self.spec.env}

    # --- files ---

    async def read_file(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """See `Sandbox.read_file`."""
        limit = self.spec.limits.max_file_bytes if max_bytes is None else max_bytes
        try:
            return await self._ask(self._started.channel.read(self._path(path), limit))
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise ValueError(f"{self.name}: {path!r} is larger than {limit} bytes") from None
            if error.errno in _OUR_FAULT:
                raise SandboxError(f"{self.name}: {path!r} cannot be read: {error.strerror}") from error
            raise FileNotFoundError(f"{self.name}: no file {path!r} to read: {error.strerror}") from None

    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """See `Sandbox.write_file`."""
        try:
            await self._ask(self._started.channel.write(self._path(path), content, mode))
        except OSError as error:
            raise OSError(error.errno, f"{self.name}: {path!r} cannot be written: {error.strerror}") from None

    async def write_files(self, files: Mapping[str, bytes | SandboxFile]) -> None:
        """See `Sandbox.write_files`."""
        for path, file in files.items():
            whole = with_mode(file)
            await self.write_file(path, whole.content, mode=whole.mode)

    def _cwd(self, cwd: str | None) -> str:
        # One that is too long is the command's fault, as one that is not there: the server says so.
        return self._path((cwd or ".")[: MAX_PATH_BYTES // 4])

    def _path(self, path: str) -> str:
        if not path or "\0" in path:
            raise ValueError(f"path {path!r} must not be empty or hold NUL characters")
        if len(path.encode("utf-8", "replace")) > MAX_PATH_BYTES:
            raise FileNotFoundError(f"{self.name}: a path of {len(path)} characters names nothing: it is too long")
        if self._confined and (path.startswith("/") or ".." in path.split("/")):
            raise ValueError(f"path {path!r} must be relative and stay inside the working folder")
        return _plain(path)

    # --- the sandbox as a whole ---

    async def kill_all(self) -> int:
        """See `Sandbox.kill_all`."""
        killed, left = await self._ask(self._started.channel.kill_all())
        if left:
            raise SandboxError(f"{self.name}: {left} processes could not be killed")
        return killed

    async def reset(self) -> None:
        """See `Sandbox.reset`."""
        self._check_open()
        self.resets += 1
        await self._end()
        self._started = await self._start(self.spec)
        if self._closed:
            await self._end()
            raise SandboxError(f"{self.name}: {CLOSED_WHILE}")
        await self._write_spec()

    async def _ask(self, request: Awaitable[T]) -> T:
        """What the server answers; when it is gone, why."""
        try:
            self._check_open()
        except SandboxError:
            if asyncio.iscoroutine(request):
                request.close()
            raise
        try:
            return await request
        except SandboxError as error:
            if self._closed:
                raise SandboxError(f"{self.name}: {CLOSED_WHILE}") from error
            if not self._started.channel.lost.done():
                raise
            why = await self._started.lease.why_gone()
            raise SandboxError(f"{self.name}: the sandbox ended by itself: {why}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(f"{self.name}: the sandbox is closed; start a new one")

    @property
    def closed(self) -> bool:
        return self._closed

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if self._closed:
            return
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        self._started.channel.close()
        # What is released has to be released also when the caller is cancelled meanwhile.
        await asyncio.shield(self._started.lease.release())

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
    return [_plain(argument) for argument in argv]


def _plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _result(done: wire.Exit, duration_s: float) -> ExecResult:
    code = TIMEOUT_EXIT_CODE if done.timed_out else KILLED_EXIT_CODE if done.flooded else done.exit_code
    stderr = text_of(done.stderr)
    if done.no_process:
        stderr += "no process can be started: other commands use them all\n"
    return ExecResult(
        exit_code=code,
        stdout=text_of(done.stdout),
        stderr=stderr,
        timed_out=done.timed_out,
        oom_killed=done.oom_killed,
        output_truncated=_cut(done.stdout) > 0 or _cut(done.stderr) > 0,
        processes_left=done.processes_left,
        duration_s=duration_s,
    )


def _cut(output: wire.Output) -> int:
    return output.total_bytes - len(output.head) - len(output.tail)


def text_of(output: wire.Output) -> str:
    """Bytes that are no UTF-8 are replaced; a character that the cut went through is left out.

    >>> text_of(wire.Output(head=b"ab\\xc3", tail=b"\\xa9z", total_bytes=10))
    'ab\\n[... 5 bytes cut ...]\\nz'
    """
    cut = _cut(output)
    head = codecs.getincrementaldecoder("utf-8")("replace").decode(output.head, final=cut == 0)
    if cut == 0:
        return head
    start = 0
    while start < min(3, len(output.tail)) and output.tail[start] & 0xC0 == 0x80:
        start += 1
    return f"{head}\n[... {cut} bytes cut ...]\n{output.tail[start:].decode('utf-8', 'replace')}"
