"""The process that starts sandboxes for all processes of this user on this host, and keeps some of them warm.

It is started by whoever needs it first (`pool_client.py`) and ends shortly after the last one has gone. It hands a
sandbox's channel over as an open socket and closes its own copy, so a sandbox belongs to the process that uses it, and
ends with that process. When this process ends, by a signal or killed, the sandboxes in use go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
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
ACCEPT_AGAIN_S = 0.1
MAX_ERROR_CHARACTERS = 8192
WISHES = ("check", "start")


class _Client:
    """One connected process and the sandboxes that it has."""

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        self.sandboxes: dict[str, Launched] = {}
        self.sending = asyncio.Lock()
        self.wishes: set[asyncio.Task[None]] = set()
        """What it asks for itself, and nobody needs when it is gone."""
        self.duties: set[asyncio.Task[None]] = set()
        """What has to be done whether it is gone or not."""

    def hang_up(self) -> None:
        """Its process sees the end, and so does whoever reads here."""
        with contextlib.suppress(OSError):
            self.connected.shutdown(socket.SHUT_RDWR)


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
        self.stopping.set()
        accepting.cancel()
        reaping.cancel()
        listener.close()
        # They ask the next pool, and what they have goes on.
        for client in self._clients:
            client.hang_up()
        await self._pool.close()
        while self._tasks:
            await asyncio.wait(self._tasks)
        # What was in use when an earlier pool was killed may have ended since this one began.
        await self._reap_once()
        await self._launcher.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, _ = await loop.sock_accept(listener)
            except OSError:  # too many files are open; some will be closed
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            connected.setblocking(False)
            if peer_is_us(connected):
                client = _Client(connected)
                self._clients.add(client)
                self._spawn(self._talk(client), self._tasks)
            else:
                connected.close()

    def _spawn(self, work: Coroutine[None, None, None], *sets: set[asyncio.Task[None]]) -> None:
        task = asyncio.ensure_future(work)
        for tasks in sets:
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _reap(self) -> None:
        while True:
            self._pool.beat()
            self._pool.forget()
            await self._reap_once()
            await asyncio.sleep(wire.BEAT_S)

    async def _reap_once(self) -> None:
        for launched in list(self._later):
            with contextlib.suppress(Exception):
                await launched.end()
                self._later.discard(launched)
        with contextlib.suppress(Exception):
            await self._launcher.reap()

    async def _talk(self, client: _Client) -> None:
        try:
            while True:
                received = await receive_message(client.connected)
                if received is None:
                    break
                request = received[0]
                kind = client.wishes if request["ask"] in WISHES else client.duties
                self._spawn(self._answer(client, request), self._tasks, kind)
        finally:
            self._clients.discard(client)
            await self._end_all(client)
            if client.duties:
                await asyncio.wait(client.duties)
            client.connected.close()

    async def _end_all(self, client: _Client) -> None:
        """What a client leaves behind, and the warm ones when it was the last.

        When the pool ends, what it handed over stays: the client may live, and a dead one's ends with its channel.
        """
        for wish in client.wishes:
            wish.cancel()
        if client.wishes:
            await asyncio.wait(client.wishes)
        if not self.stopping.is_set():
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
            except Exception:
                await asyncio.sleep(pause_s)
        try:
            await launched.end()
        except Exception:
            self._later.add(launched)
            raise

    async def _answer(self, client: _Client, request: dict[str, Any]) -> None:
        """Whatever happens, the question gets an answer, or its client sees that the connection ends."""
        number = request["id"]
        try:
            if request["ask"] == "start":
                await self._start(client, request)
            else:
                await self._send(client, {"id": number, **await self._do(client, request)})
        except Exception as error:
            named = error if isinstance(error, SandboxError) else self._named(error)
            unavailable = isinstance(named, SandboxUnavailableError)
            try:
                await self._send(client, {"id": number, "error": _short(str(named)), "unavailable": unavailable})
            except OSError:
                client.hang_up()

    def _named(self, error: Exception) -> SandboxError:
        return SandboxError(f"{self._launcher.name}: the pool could not do this: {type(error).__name__}: {error}")

    async def _send(self, client: _Client, answer: dict[str, Any], files: Sequence[int] = ()) -> None:
        async with client.sending:
            await send_message(client.connected, answer, files)

    async def _start(self, client: _Client, request: dict[str, Any]) -> None:
        """Hand a sandbox over; it ends when that fails or is cancelled."""
        launched, was_ready = await self._pool.take(spec_from_json(request["spec"]), request["warm"])
        client.sandboxes[launched.name] = launched
        answer = {"id": request["id"], "sandbox": launched.name, "variables": dict(launched.variables)}
        try:
            await self._send(client, answer | {"warm": was_ready}, [launched.connected.fileno()])
        except BaseException:
            client.sandboxes.pop(launched.name, None)
            self._spawn(self._end(launched), self._tasks, client.duties)
            raise
        launched.connected.close()

    async def _do(self, client: _Client, request: dict[str, Any]) -> dict[str, Any]:
        match request["ask"]:
            case "check":
                spec = spec_from_json(request["spec"])
                await self._launcher.check(spec)
                self._pool.expect(spec, request["warm"])
            case "end":
                sandbox = client.sandboxes.pop(request["sandbox"], None)
                if sandbox is not None:
                    await self._end(sandbox)
                else:
                    await self._launcher.end_foreign(request["sandbox"])
            case "why":
                sandbox = client.sandboxes.get(request["sandbox"])
                return {"why": "its pool process was killed" if sandbox is None else await sandbox.why_gone()}
            case "leave":
                await self._end_all(client)
            case "state":
                return {"ready": self._pool.ready, "pid": os.getpid()}
            case unknown:
                raise SandboxError(f"the pool knows no question {unknown!r}")
        return {}


def _short(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]} ..."


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
    # Each sandbox takes a few open files. What bwrap starts inherits this, as a container has the engine's own limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
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
