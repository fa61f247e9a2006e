"""One subprocess of this machine, with a time limit and bounded output.

The local and the bubblewrap sandbox share it. It leaves out what isolation means; it only promises that the process
group is gone and that memory stays bounded, however the command behaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from envs.sandbox.base import SandboxError
from envs.sandbox.command import KILLED_EXIT_CODE, Capture, RawResult

# After the command ended, what is still in the pipes is read for at most so long: a child that left the process group
# may hold them open for ever.
DRAIN_S = 0.5
KILL_S = 2.0


class _Output(asyncio.SubprocessProtocol):
    """Collects both streams.

    `Process.wait()` of asyncio's streams returns only when the pipes are closed, which a background child can delay
    for ever; the protocol's `process_exited` does not wait for them.
    """

    def __init__(self, max_output_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.stdout = Capture(max_output_bytes)
        self.stderr = Capture(max_output_bytes)
        self.stopped: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()
        self._open_pipes = {1, 2}

    @property
    def flooded(self) -> bool:
        return self.stdout.flooded or self.stderr.flooded

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        (self.stdout if fd == 1 else self.stderr).add(data)
        if self.flooded:
            _settle(self.stopped)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        if not self._open_pipes:
            _settle(self.drained)

    def process_exited(self) -> None:
        _settle(self.exited)
        _settle(self.stopped)


async def run_process(
    argv: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    stdin: bytes,
    max_output_bytes: int,
    pass_fds: Sequence[int] = (),
    kill: Callable[[int], None] | None = None,
) -> RawResult:
    """Run `argv` in a process group of its own; when it returns or is cancelled, the group is gone.

    `kill(pid)` ends a command that is late, cancelled or flooding; the process group is killed when it is not given
    or has not helped within two seconds. The exit code is 128 + signal when a signal ended the process.

    Raises:
        SandboxError: the process could not be started.
    """
    try:
        transport, output = await _spawn(argv, cwd, environment, bool(stdin), max_output_bytes, pass_fds)
    except OSError as error:
        raise SandboxError(f"{argv[0]} could not be started in {cwd}: {error.strerror}") from error
    timed_out = False
    try:
        _feed(transport, stdin)
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(output.stopped)
    except TimeoutError:
        timed_out = True
    finally:
        await asyncio.shield(_end(transport, output, kill))
    code = transport.get_returncode()
    assert code is not None, "a reaped process has a return code"
    return RawResult(
        exit_code=KILLED_EXIT_CODE if output.flooded else (code if code >= 0 else 128 - code),
        stdout=output.stdout.content,
        stderr=output.stderr.content,
        timed_out=timed_out,
        output_truncated=output.stdout.truncated or output.stderr.truncated,
    )


async def _spawn(
    argv: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    has_stdin: bool,
    max_output_bytes: int,
    pass_fds: Sequence[int],
) -> tuple[asyncio.SubprocessTransport, _Output]:
    return await asyncio.get_running_loop().subprocess_exec(
        lambda: _Output(max_output_bytes),
        *argv,
        stdin=asyncio.subprocess.PIPE if has_stdin else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env=dict(environment),
        pass_fds=pass_fds,
        start_new_session=True,
    )


def _feed(transport: asyncio.SubprocessTransport, stdin: bytes) -> None:
    pipe = transport.get_pipe_transport(0)
    if isinstance(pipe, asyncio.WriteTransport):
        pipe.write(stdin)
        pipe.write_eof()


async def _end(transport: asyncio.SubprocessTransport, output: _Output, kill: Callable[[int], None] | None) -> None:
    """End the process if it still runs, then its whole group: members may be left when it ended by itself."""
    pid = transport.get_pid()
    if kill is not None and not output.exited.done():
        kill(pid)
        await asyncio.wait([output.exited], timeout=KILL_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    await output.exited
    await asyncio.wait([output.drained], timeout=DRAIN_S)
    transport.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
