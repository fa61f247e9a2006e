"""The process that starts sandboxes for all processes of this user on this host, and keeps some of them warm.

It is started by whoever needs it first (`pool_client.py`) and ends shortly after the last one has gone. It hands a
sandbox's channel over as an open socket and closes its own copy, so a sandbox belongs to the process that uses it, and
ends with that process. When this process is killed, the sandboxes in use go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Any

from envs.sandbox import wire
from envs.sandbox.base import SandboxError, SandboxUnavailableError
from envs.sandbox.launch import Launched, Launcher
from envs.sandbox.pool import Pool
from envs.sandbox.pool_wire import PoolKind, new_socket, peer_is_us, receive_message, send_message, spec_from_json

LINGER_S = 2.0
END_PAUSES_S = (0.5, 2.0, 5.0)
"""A daemon that restarts is away for seconds; what could not be ended meanwhile is tried again."""
BACKLOG = 256


class _Client:
    """One connected process and the sandboxes that it has."""

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        self.sandboxes: dict[str, Launched] = {}
        self.sending = asyncio.Lock()


class PoolServer:
    """Answers the clients of one address."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._pool = Pool(launcher)
        self._clients: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._later: set[Launched] = set()
        self.stopping = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Until the last client has been gone for a while, or a signal says so."""
        loop = asyncio.get_running_loop()
        reaping = asyncio.ensure_future(self._reap())
        accepting = asyncio.ensure_future(self._accept(listener))
        idle_since = loop.time()
        while not self.stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S / 4):
                    await self.stopping.wait()
            if self._clients or self._tasks:
                idle_since = loop.time()
            elif loop.time() - idle_since > LINGER_S:
                break
        accepting.cancel()
        reaping.cancel()
        listener.close()
        for client in list(self._clients):
            client.connected.close()
        await self._pool.close()
        # What was in use when an earlier pool was killed may have ended since this one began.
        await self._reap_once()
        await self._launcher.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connected, _ = await loop.sock_accept(listener)
            connected.setblocking(False)
            if peer_is_us(connected):
                self._spawn(self._talk(_Client(connected)))
            else:
                connected.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reap(self) -> None:
        while True:
            await self._reap_once()
            self._pool.beat()
            await asyncio.sleep(wire.BEAT_S)

    async def _reap_once(self) -> None:
        for launched in list(self._later):
            with contextlib.suppress(SandboxError):
                await launched.end()
                self._later.discard(launched)
        with contextlib.suppress(SandboxError, OSError):
            await self._launcher.reap()

    async def _talk(self, client: _Client) -> None:
        self._clients.add(client)
        try:
            while True:
                received = await receive_message(client.connected)
                if received is None:
                    break
                self._spawn(self._answer(client, received[0]))
        finally:
            self._clients.discard(client)
            await self._end_all(client)
            client.connected.close()

    async def _end_all(self, client: _Client) -> None:
        """What a client leaves behind, and the warm ones when it was the last."""
        sandboxes = list(client.sandboxes.values())
        client.sandboxes.clear()
        await asyncio.gather(*(self._end(sandbox) for sandbox in sandboxes), return_exceptions=True)
        if not self._clients - {client}:
            await self._pool.empty()

    async def _end(self, launched: Launched) -> None:
        """End a sandbox for certain: what cannot be ended now is told, and tried until it can."""
        for pause_s in END_PAUSES_S:
            try:
                return await launched.end()
            except SandboxError:
                await asyncio.sleep(pause_s)
        try:
            await launched.end()
        except SandboxError:
            self._later.add(launched)
            raise

    async def _answer(self, client: _Client, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        files: list[int] = []
        launched: Launched | None = None
        try:
            match request["ask"]:
                case "check":
                    spec = spec_from_json(request["spec"])
                    await self._launcher.check(spec)
                    self._pool.expect(spec, request["warm"])
                case "start":
                    launched, was_ready = await self._pool.take(spec_from_json(request["spec"]), request["warm"])
                    name = launched.name
                    client.sandboxes[name] = launched
                    answer |= {"sandbox": name, "variables": dict(launched.variables), "warm": was_ready}
                    files = [launched.connected.fileno()]
                case "end":
                    sandbox = client.sandboxes.pop(request["sandbox"], None)
                    if sandbox is not None:
                        await self._end(sandbox)
                    else:
                        await self._launcher.end_foreign(request["sandbox"])
                case "why":
                    sandbox = client.sandboxes.get(request["sandbox"])
                    answer["why"] = "its pool process was killed" if sandbox is None else await sandbox.why_gone()
                case "leave":
                    await self._end_all(client)
                case "state":
                    answer |= {"ready": self._pool.ready, "pid": os.getpid()}
        except SandboxError as error:
            answer |= {"error": str(error), "unavailable": isinstance(error, SandboxUnavailableError)}
        try:
            async with client.sending:
                await send_message(client.connected, answer, files)
        except OSError:  # the client is gone, and with it what it asked for
            if launched is not None:
                await launched.end()
        finally:
            if launched is not None:
                launched.connected.close()
                if client not in self._clients:
                    await launched.end()


def open_launcher(kind: PoolKind) -> Launcher:
    # Each back-end is imported when it is asked for, so that none needs what another one needs.
    if kind.backend == "docker":
        from envs.sandbox.docker import DockerLauncher

        return DockerLauncher(kind.runtime)
    from envs.sandbox.bubblewrap import BubblewrapLauncher

    return BubblewrapLauncher()


async def _main(kind: PoolKind) -> None:
    listener = new_socket()
    try:
        listener.bind(kind.address)
    except OSError:
        return  # another process was quicker, and serves this address
    listener.listen(BACKLOG)
    server = PoolServer(open_launcher(kind))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, server.stopping.set)
    await server.serve(listener)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["docker", "bubblewrap"])
    parser.add_argument("--runtime", default=None)
    arguments = parser.parse_args()
    asyncio.run(_main(PoolKind(backend=arguments.backend, runtime=arguments.runtime)))


if __name__ == "__main__":
    sys.exit(main())
