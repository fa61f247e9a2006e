"""The frames between a client and the server inside a sandbox, as bytes. `server/server.h` has the same words.

A frame is a header of 12 bytes (payload size, id, kind; little-endian) and a payload. The id names a command, a file
being moved, or a connection; the client chooses it, but for connections, whose highest bit is set.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VERSION = 1
MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Of one stream, what is kept at most: past so much, a command is ended."""
CHUNK_BYTES = 64 * 1024
"""Of a file or of stdin, what travels in one frame."""
MAX_CONNECTIONS = 64
"""To the proxy's port, at once; `server/server.h` has the same number.

After OPENED, the server sends one piece (DATA) and then no other until the client has said TOOK; an empty piece says
that nothing more comes. CLOSED says that the connection is gone, both ways. The client sends INPUT, which the server
answers with TAKEN, or CLOSED; an empty INPUT ends the connection.
"""

EXEC, INPUT, KILL, KILL_ALL, READ, WRITE, PING, BEAT, TOOK = b"E", b"I", b"K", b"A", b"R", b"W", b"P", b"B", b"T"
HELLO, TAKEN, EXIT, KILLED, DATA, DONE, PONG, OPENED, CLOSED = b"h", b"i", b"x", b"k", b"d", b"f", b"p", b"o", b"c"

BEAT_S = 60.0
"""So often a client gives a sign of life."""
SILENCE_S = 300.0
"""A server that has heard nothing for so long ends its sandbox: an engine that was killed can leave the channel open.
`server/server.h` has the same number."""

_HEADER = struct.Struct("<IIc3x")
_EXIT = struct.Struct("<9I4x2Q")
_MAX_TIMEOUT_MS = 2**32 - 1
_HAS_INPUT, _WANTS_STATE = 1, 2
_TIMED_OUT, _OUT_OF_MEMORY, _FLOODED, _NO_PROCESS = 1, 2, 4, 8
_FIRST, _LAST = 1, 2


@dataclass(frozen=True, slots=True)
class Frame:
    kind: bytes
    id: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is kept of a stream: all of it, or its head and its tail."""

    head: bytes
    tail: bytes
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a command ended. `state` is a shell session's (`exec_frame`), empty when the shell left none."""

    exit_code: int
    timed_out: bool
    oom_killed: bool
    flooded: bool
    no_process: bool
    processes_left: int
    start_error: int
    """Why it could not be started (an errno), else 0."""
    stdout: Output
    stderr: Output
    state: bytes


def frame(kind: bytes, number: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload), number, kind) + payload


def exec_frame(
    number: int,
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: str,
    variables: Sequence[str],
    has_input: bool,
    wants_state: bool,
    max_output_bytes: int,
) -> bytes:
    """The request to run `argv`. `variables` are all of its variables, as NAME=value.

    With `wants_state`, what the command writes to file descriptor 9 comes back as `Exit.state`.
    """
    flags = _HAS_INPUT * has_input | _WANTS_STATE * wants_state
    timeout_ms = round(min(max(0.0, timeout_s) * 1000, _MAX_TIMEOUT_MS))
    kept_bytes = min(max(0, max_output_bytes), MAX_KEPT_BYTES)
    numbers = struct.pack("<5I", timeout_ms, kept_bytes, flags, len(argv), len(variables))
    texts = b"".join(text.encode() + b"\0" for text in (cwd, *argv, *variables))
    return frame(EXEC, number, numbers + texts)


def read_frame(number: int, path: str, max_bytes: int) -> bytes:
    return frame(READ, number, struct.pack("<I", min(max(0, max_bytes), 2**32 - 1)) + path.encode() + b"\0")


def write_frames(number: int, path: str, content: bytes, mode: int) -> Iterator[bytes]:
    """A file in pieces; the server answers the last one."""
    starts = range(0, max(1, len(content)), CHUNK_BYTES)
    for start in starts:
        flags = _FIRST * (start == 0) | _LAST * (start == starts[-1])
        piece = content[start : start + CHUNK_BYTES]
        yield frame(WRITE, number, struct.pack("<II", flags, mode & 0o7777) + path.encode() + b"\0" + piece)


def write_end_frame(number: int, path: str) -> bytes:
    """The end of a file whose other pieces do not come."""
    return frame(WRITE, number, struct.pack("<II", _LAST, 0) + path.encode() + b"\0")


def read_exit(payload: bytes) -> Exit:
    code, flags, left, failed, *sizes, out_total, err_total = _EXIT.unpack_from(payload)
    parts: list[bytes] = []
    at = _EXIT.size
    for size in sizes:
        parts.append(payload[at : at + size])
        at += size
    return Exit(
        exit_code=code,
        timed_out=bool(flags & _TIMED_OUT),
        oom_killed=bool(flags & _OUT_OF_MEMORY),
        flooded=bool(flags & _FLOODED),
        no_process=bool(flags & _NO_PROCESS),
        processes_left=left,
        start_error=failed,
        stdout=Output(head=parts[0], tail=parts[1], total_bytes=out_total),
        stderr=Output(head=parts[2], tail=parts[3], total_bytes=err_total),
        state=parts[4],
    )


class FrameReader:
    """Cuts a byte stream into frames.

    >>> reader = FrameReader()
    >>> whole = frame(PONG, 7, b"abc")
    >>> list(reader.add(whole[:5])), list(reader.add(whole[5:]))
    ([], [Frame(kind=b'p', id=7, payload=b'abc')])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> Iterator[Frame]:
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            size, number, kind = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Frame(kind, number, payload)
