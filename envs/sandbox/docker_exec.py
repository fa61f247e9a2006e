"""One command inside a container: how it is wrapped, and how its output is read from Docker's attached stream.

Docker says that a command has ended only when its output is closed, and a background child can hold that open for
ever. So a small shell waits for the command and prints a mark with the exit code to both streams; what comes before
the mark is the output, and the mark is the end. The mark is random, so no command prints it by accident.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Any

from envs.sandbox.command import KILLED_EXIT_CODE, Capture, RawResult

_HEADER_BYTES = 8
_STDOUT, _STDERR = 1, 2

# In a subshell, so that `exec` finds programs only (no shell builtin) and gives 127 or 126 when it finds none. The
# waiting shell's own stderr is closed meanwhile, because it would add its remark when a signal ends the command.
_SCRIPT = r"""
mark=$1; shift
exec 3>&2 2>/dev/null
(exec "$@" 2>&3 3>&-)
code=$?
printf '\n%s %d\n' "$mark" $code
printf '\n%s %d\n' "$mark" $code >&3
"""


def new_mark() -> str:
    return secrets.token_hex(16)


def wrapped(argv: Sequence[str], mark: str) -> list[str]:
    """`argv` behind the shell that reports its end."""
    return ["sh", "-c", _SCRIPT, "sh", mark, *argv]


class MarkedStream:
    """One output stream up to its mark.

    >>> stream = MarkedStream(10, "m1")
    >>> stream.add(b"hello\\nm"); stream.add(b"1 3\\nlate")
    >>> stream.capture.content, stream.exit_code
    (b'hello', 3)
    """

    def __init__(self, max_bytes: int, mark: str) -> None:
        self.capture = Capture(max_bytes)
        self.exit_code: int | None = None
        self._mark = f"\n{mark} ".encode()
        self._pending = b""

    def add(self, data: bytes) -> None:
        if self.exit_code is not None:
            return
        self._pending += data
        at = self._pending.find(self._mark)
        if at < 0:
            # The last bytes may be the beginning of the mark.
            at = max(0, len(self._pending) - len(self._mark))
            self._flush(at)
            return
        self._flush(at)
        code, newline, _ = self._pending[len(self._mark) :].partition(b"\n")
        if newline:
            self.exit_code = int(code)
            self._pending = b""

    def finish(self) -> None:
        """The stream ended without a mark: what was held back is output too."""
        self._flush(len(self._pending))

    def _flush(self, count: int) -> None:
        self.capture.add(self._pending[:count])
        self._pending = self._pending[count:]


class ExecStream(asyncio.Protocol):
    """Splits Docker's attached stream into stdout and stderr.

    Each frame has a header of 8 bytes: the stream's number, three zeros, the length (big-endian), as the Docker Engine
    API describes under ContainerAttach.
    """

    def __init__(self, max_output_bytes: int, mark: str) -> None:
        self._streams = {number: MarkedStream(max_output_bytes, mark) for number in (_STDOUT, _STDERR)}
        self._buffer = bytearray()
        self._left = 0  # bytes of the current frame that are still to come
        self._current = self._streams[_STDOUT]
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._buffer:
            if self._left == 0:
                if len(self._buffer) < _HEADER_BYTES:
                    return
                self._current = self._streams.get(self._buffer[0], self._current)
                self._left = int.from_bytes(self._buffer[4:_HEADER_BYTES], "big")
                del self._buffer[:_HEADER_BYTES]
            part = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            self._left -= len(part)
            self._current.add(part)
        if self.exit_code is not None or self.flooded:
            self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)

    @property
    def flooded(self) -> bool:
        return any(stream.capture.flooded for stream in self._streams.values())

    @property
    def exit_code(self) -> int | None:
        """The command's exit code, when both streams have ended with the mark; None before, and when killed."""
        codes = [stream.exit_code for stream in self._streams.values()]
        return None if None in codes else codes[0]

    def result(self, exit_code: int, *, timed_out: bool) -> RawResult:
        for stream in self._streams.values():
            stream.finish()
        out, err = (self._streams[number].capture for number in (_STDOUT, _STDERR))
        return RawResult(
            exit_code=KILLED_EXIT_CODE if self.flooded else exit_code,
            stdout=out.content,
            stderr=err.content,
            timed_out=timed_out,
            output_truncated=out.truncated or err.truncated,
        )


class AttachedExec:
    """The socket that Docker hands over for one exec."""

    def __init__(self, handed: Any) -> None:
        self._handed = handed
        self._socket: socket.socket = handed._sock
        self._transport: asyncio.Transport | None = None
        # The SDK reads the answer's header through a buffer, and a quick command's first output may lie there.
        self._socket.setblocking(False)
        self._early: bytes = handed._response.raw._fp.fp.peek() or b""

    async def connect(self, stream: ExecStream) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        stream.data_received(self._early)
        self._transport, _ = await loop.create_connection(lambda: stream, sock=self._socket)
        return self._transport

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._handed._response.close()
