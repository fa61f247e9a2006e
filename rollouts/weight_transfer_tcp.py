"""How do weights travel from the trainer to servers? Over TCP: the trainer listens, each worker connects.

All workers get a bucket before the
next one is made, so memory stays bounded; one that fails is left behind, and the others go on.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollouts.engine import EngineError
from rollouts.weight_transfer import buckets

if TYPE_CHECKING:
    from torch import Tensor

_TOKEN_BYTES = 32


class TcpChannel:
    """A `WeightChannel` for one sync.

    Args:
        workers: how many connect, by the server's address.
        timeout_s: how long either side waits for the other to move on.
    """

    def __init__(self, workers: Mapping[str, int], *, timeout_s: float) -> None:
        self._workers = dict(workers)
        self._timeout_s = timeout_s
        self._hosts = {server: address_towards(server) for server in workers}
        self._tokens = {server: secrets.token_hex(_TOKEN_BYTES) for server in workers}
        self._connections: dict[str, list[socket.socket]] = {server: [] for server in workers}
        self._changed = asyncio.Event()
        self._visitors: set[asyncio.Task[None]] = set()
        self._acceptor: asyncio.Task[None] | None = None
        self._listener = _listen(local=all(host.startswith("127.") for host in self._hosts.values()))

    def init_info(self, server: str) -> dict[str, Any]:
        port = self._listener.getsockname()[1]
        token, timeout_s = self._tokens[server], self._timeout_s
        return {"host": self._hosts[server], "port": port, "token": token, "timeout_s": timeout_s}

    async def send(self, tensors: Mapping[str, Tensor], dtype: str) -> int:
        self._acceptor = asyncio.create_task(self._accept())
        await self._all_connected()
        pieces = buckets(tensors, dtype)
        sent = 0
        bucket = await asyncio.to_thread(_next, pieces)
        while bucket:
            # The next bucket is made while this one is on its way.
            _, after = await asyncio.gather(self._to_all(bucket), asyncio.to_thread(_next, pieces))
            sent += sum(view.nbytes for view in bucket)
            bucket = after
        return sent

    def leave(self, server: str) -> None:
        self._workers.pop(server, None)
        for connection in self._connections.pop(server, ()):
            connection.close()
        self._changed.set()

    async def close(self) -> None:
        tasks = [*self._visitors, *([self._acceptor] if self._acceptor is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in list(self._connections):
            self.leave(server)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            connection.setblocking(False)
            task = asyncio.create_task(self._welcome(connection))
            self._visitors.add(task)
            task.add_done_callback(self._visitors.discard)

    async def _welcome(self, connection: socket.socket) -> None:
        """Whoever does not say a token is none of ours."""
        loop, said = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not said.endswith(b"\n") and len(said) <= 2 * _TOKEN_BYTES:
                    piece = await loop.sock_recv(connection, 2 * _TOKEN_BYTES + 1 - len(said))
                    if not piece:
                        break
                    said += piece
        except (OSError, TimeoutError):
            connection.close()
            return
        for server, token in self._tokens.items():
            if hmac.compare_digest(said, f"{token}\n".encode()) and server in self._workers:
                self._connections[server].append(connection)
                self._changed.set()
                return
        connection.close()

    async def _all_connected(self) -> None:
        """A server that does not come in half of the time is left behind, so that the others have the other half."""
        try:
            async with asyncio.timeout(self._timeout_s / 2):
                while self._missing():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for server in self._missing():
                self.leave(server)

    def _missing(self) -> list[str]:
        return [server for server, count in self._workers.items() if len(self._connections[server]) < count]

    async def _to_all(self, bucket: Sequence[memoryview]) -> None:
        servers = list(self._workers)
        if not servers:
            raise EngineError("no server is left that takes the weights")
        await asyncio.gather(*(self._to_one(server, bucket) for server in servers))

    async def _to_one(self, server: str, bucket: Sequence[memoryview]) -> None:
        """A server that hangs up says why in its answer to `/update_weights`: here it is only left behind."""
        loop = asyncio.get_running_loop()
        for connection in list(self._connections.get(server, ())):
            try:
                async with asyncio.timeout(self._timeout_s):
                    for view in bucket:
                        await loop.sock_sendall(connection, view)
            except (OSError, TimeoutError):
                self.leave(server)
                return


def receive_tensors(trainer: Mapping[str, Any], info: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The worker's end: connect, say the token, and read one tensor after the other. Blocks.

    Args:
        trainer: `TcpChannel.init_info`.
        info: `weight_transfer.update_info`.

    Raises:
        OSError: the trainer does not answer, or stopped in the middle.
    """
    import torch

    with socket.create_connection((trainer["host"], trainer["port"]), timeout=trainer["timeout_s"]) as connection:
        connection.sendall(f"{trainer['token']}\n".encode())
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            _read_into(connection, tensor.reshape(-1).view(torch.uint8).numpy().data, name)
            yield name, tensor


def _read_into(connection: socket.socket, buffer: memoryview, name: str) -> None:
    done = 0
    while done < buffer.nbytes:
        read = connection.recv_into(buffer[done:])
        if not read:
            raise ConnectionError(f"the trainer closed the connection in the middle of {name}")
        done += read


def address_towards(server: str) -> str:
    """This machine's address on the way to a server, which is where that server reaches it.

    >>> address_towards("http://127.0.0.1:8000")
    '127.0.0.1'
    """
    host, port = urlsplit(server).hostname, urlsplit(server).port or 80
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent: connecting only chooses the way
        probe.connect(target)
        return probe.getsockname()[0]


def _listen(*, local: bool) -> socket.socket:
    """A free port; of this machine only where all servers are here."""
    both = not local and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        ("127.0.0.1" if local else "", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
    )
    listener.setblocking(False)
    return listener


def _next(pieces: Iterator[list[memoryview]]) -> list[memoryview] | None:
    return next(pieces, None)
