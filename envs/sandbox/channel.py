"""The client's end of the channel to the server inside a sandbox: one coroutine for each request, any number at once.

Nothing here knows how the sandbox was made; a channel is a connected socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from envs.sandbox import wire
from envs.sandbox.base import SandboxError

ANSWER_S = 30.0
"""The server answers at once; past this (and a command's own time limit) the sandbox counts as broken."""
KILL_S = 10.0
GONE = "the sandbox is gone"

Unwrap = Callable[[bytes], Iterable[bytes]]
Serve = Callable[["Connection"], Awaitable[None]]


@dataclass(slots=True)
class _Request:
    """What has come back so far for one id."""

    answer: asyncio.Future[wire.Frame]
    data: list[bytes] = field(default_factory=list)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    held: bool = False


class Connection:
    """A connection that a program inside made to the proxy's port."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._gone = False
        self.taken = asyncio.Event()
        self.serving: asyncio.Task[None] | None = None

    def arrive(self, data: bytes) -> None:
        """Called with a piece from inside, and not again until `read` has taken it; with nothing at the end."""
        self._arrived.put_nowait(data)

    def end(self) -> None:
        """Called when the program inside is gone: nothing can be read or written any more."""
        self._gone = True
        self.taken.set()
        self._arrived.put_nowait(b"")
        if self.serving is not None:
            self.serving.cancel()

    async def read(self) -> bytes:
        """The next bytes from inside; empty at the end."""
        data = await self._arrived.get()
        if data and not self._gone:
            self._channel.send(wire.frame(wire.TOOK, self._number))
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes inside, and wait until they are taken.

        Raises:
            ConnectionError: nobody is there to take them.
        """
        for start in range(0, len(data), wire.CHUNK_BYTES):
            if not self._gone:
                self.taken.clear()
                self._channel.send(wire.frame(wire.INPUT, self._number, data[start : start + wire.CHUNK_BYTES]))
                await self.taken.wait()
            if self._gone:
                raise ConnectionError("the program inside has closed its connection")

    def close(self) -> None:
        """End it; there may be nothing left to end."""
        if not self._gone:
            with contextlib.suppress(SandboxError):
                self._channel.send(wire.frame(wire.INPUT, self._number))


class Channel(asyncio.Protocol):
    """Requests to one server. Made by `Channel.open`."""

    def __init__(self, name: str, unwrap: Unwrap | None, serve: Serve | None) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.lost: asyncio.Future[None] = loop.create_future()
        self._unwrap = unwrap
        self._serve = serve
        self._reader = wire.FrameReader()
        self._requests: dict[int, _Request] = {}
        self._connections: dict[int, Connection] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._last = 0
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._transport: asyncio.Transport | None = None
        self._next_beat: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls, connected: socket.socket, name: str, *, unwrap: Unwrap | None = None, serve: Serve | None = None
    ) -> Channel:
        """Take over a connected socket whose other end is a server, and see that it answers.

        `unwrap` takes a container engine's own framing off what arrives; `serve` is called for each connection that a
        program inside makes to the proxy's port.

        Raises:
            SandboxError: it does not.
        """
        connected.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, channel = await loop.create_connection(lambda: cls(name, unwrap, serve), sock=connected)
        channel._transport = transport
        channel._beat()
        try:
            await channel.ping()
        except BaseException:
            channel.close()
            raise
        return channel

    # --- what arrives ---

    def data_received(self, data: bytes) -> None:
        parts = [data] if self._unwrap is None else self._unwrap(data)
        for part in parts:
            for frame in self._reader.add(part):
                self._frame_received(frame)

    def _frame_received(self, frame: wire.Frame) -> None:
        request = self._requests.get(frame.id)
        connection = self._connections.get(frame.id)
        if frame.kind == wire.OPENED:
            self._connected(frame.id)
        elif frame.kind == wire.DATA and connection is not None:
            connection.arrive(frame.payload)
        elif frame.kind == wire.CLOSED and connection is not None:
            del self._connections[frame.id]
            connection.end()
        elif frame.kind == wire.TAKEN and (connection or request):
            (connection or request).taken.set()  # pyright: ignore[reportOptionalMemberAccess]
        elif frame.kind == wire.DATA and request is not None:
            request.data.append(frame.payload)
        elif request is not None and not request.answer.done():
            request.answer.set_result(frame)
        # Anything else answers a request that nobody waits for any more.

    def _connected(self, number: int) -> None:
        connection = Connection(self, number)
        if self._serve is None or len(self._connections) >= wire.MAX_CONNECTIONS:
            connection.close()
            return
        self._connections[number] = connection
        serving = asyncio.ensure_future(self._serve_one(self._serve, connection, number))
        connection.serving = serving
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve_one(self, serve: Serve, connection: Connection, number: int) -> None:
        try:
            with contextlib.suppress(OSError, SandboxError, TimeoutError):
                await serve(connection)
        finally:
            self._connections.pop(number, None)
            connection.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_beat is not None:
            self._next_beat.cancel()
        if not self.lost.done():
            self.lost.set_result(None)
        self._may_write.set()
        for request in self._requests.values():
            if not request.answer.done():
                request.answer.set_exception(SandboxError(f"{self.name}: {GONE}"))
            request.taken.set()
        for serving in self._serving:
            serving.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # --- what is asked ---

    async def ping(self, timeout_s: float = ANSWER_S) -> None:
        """Whether the server answers.

        Raises:
            SandboxError: it does not, or not in time.
        """
        with self._request() as (number, request):
            self.send(wire.frame(wire.PING, number))
            await self._answer(request, timeout_s)

    async def execute(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str,
        variables: Sequence[str],
        stdin: bytes,
        wants_state: bool,
        max_output_bytes: int,
    ) -> wire.Exit:
        """Run a command to its end. When this is cancelled, it comes back when the command is dead."""
        with self._request() as (number, request):
            self.send(
                wire.exec_frame(
                    number,
                    argv,
                    timeout_s=timeout_s,
                    cwd=cwd,
                    variables=variables,
                    has_input=bool(stdin),
                    wants_state=wants_state,
                    max_output_bytes=max_output_bytes,
                )
            )
            feeding = asyncio.ensure_future(self._feed(number, request, stdin)) if stdin else None
            try:
                return wire.read_exit((await self._answer(request, timeout_s + ANSWER_S)).payload)
            except asyncio.CancelledError:
                # It stays known until its command is dead, also when this is cancelled once more.
                request.held = True
                await asyncio.shield(self._kill(number, request))
                raise
            finally:
                if feeding is not None:
                    feeding.cancel()

    async def _feed(self, number: int, request: _Request, stdin: bytes) -> None:
        with contextlib.suppress(SandboxError):  # whoever waits for the command is told
            for start in range(0, len(stdin), wire.CHUNK_BYTES):
                request.taken.clear()
                self.send(wire.frame(wire.INPUT, number, stdin[start : start + wire.CHUNK_BYTES]))
                await request.taken.wait()
            self.send(wire.frame(wire.INPUT, number))

    async def _kill(self, number: int, request: _Request) -> None:
        try:
            with contextlib.suppress(SandboxError):
                self.send(wire.frame(wire.KILL, number))
                await self._answer(request, KILL_S)
        finally:
            del self._requests[number]

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A file's content.

        Raises:
            OSError: it cannot be read; EFBIG when it is larger than `max_bytes`.
        """
        with self._request() as (number, request):
            self.send(wire.read_frame(number, path, max_bytes))
            _raise(await self._answer(request, ANSWER_S), path)
            return b"".join(request.data)

    async def write(self, path: str, content: bytes, mode: int) -> None:
        """Write a file, and its folders.

        Raises:
            OSError: it cannot be written.
        """
        with self._request() as (number, request):
            for piece in wire.write_frames(number, path, content, mode):
                try:
                    await self._may_write.wait()
                except asyncio.CancelledError:
                    with contextlib.suppress(SandboxError):
                        self.send(wire.write_end_frame(number, path))
                    raise
                if request.answer.done():  # it failed: the rest would be thrown away
                    break
                self.send(piece)
            _raise(await self._answer(request, ANSWER_S), path)

    async def kill_all(self, *, only_background: bool = False) -> tuple[int, int]:
        """Kill every process, or those that ended commands left behind: how many there were, how many are left."""
        with self._request() as (number, request):
            self.send(wire.frame(wire.KILL_ALL, number, int(only_background).to_bytes(4, "little")))
            answer = await self._answer(request, ANSWER_S)
            return int.from_bytes(answer.payload[:4], "little"), int.from_bytes(answer.payload[4:8], "little")

    def send(self, data: bytes) -> None:
        if self.lost.done() or self._transport is None:
            raise SandboxError(f"{self.name}: {GONE}")
        self._transport.write(data)

    def _beat(self) -> None:
        if not self.lost.done():
            self.send(wire.frame(wire.BEAT, 0))
            self._next_beat = asyncio.get_running_loop().call_later(wire.BEAT_S, self._beat)

    def close(self) -> None:
        """End the channel, and with it the sandbox. Safe to call twice."""
        if self._transport is not None and not self._transport.is_closing():
            # Also for a child of this process that has the socket too.
            with contextlib.suppress(OSError):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._transport.abort()

    @contextlib.contextmanager
    def _request(self) -> Iterator[tuple[int, _Request]]:
        self._last = self._last % 0x7FFFFFFF + 1
        request = _Request(asyncio.get_running_loop().create_future())
        self._requests[self._last] = request
        number = self._last
        try:
            yield number, request
        finally:
            if not request.held:
                del self._requests[number]
            if request.answer.done() and not request.answer.cancelled():
                request.answer.exception()  # seen, also when nobody waited for it

    async def _answer(self, request: _Request, timeout_s: float) -> wire.Frame:
        done, _ = await asyncio.wait([request.answer], timeout=timeout_s)
        if not done:
            self.close()
            raise SandboxError(f"{self.name}: the sandbox gave no answer within {timeout_s:.0f} s; it was ended")
        return request.answer.result()


def _raise(answer: wire.Frame, path: str) -> None:
    code = int.from_bytes(answer.payload, "little", signed=True)
    if code != 0:
        raise OSError(code, os.strerror(code), path)
