"""The factory that gets its sandboxes from the pool of this host, whose process it starts where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from envs.sandbox.base import SandboxError, SandboxSpec, SandboxUnavailableError
from envs.sandbox.channel import Channel
from envs.sandbox.docker_host import check_host, unwrapper
from envs.sandbox.factory import ServedFactory
from envs.sandbox.launch import SERVER
from envs.sandbox.pool_wire import PoolKind, new_socket, peer_is_us, receive_message, send_message, spec_as_json
from envs.sandbox.proxy import proxy_for
from envs.sandbox.served import Started

CONNECT_S = 30.0
RETRY_S = 0.02
POOL_GONE = "the process that starts sandboxes ended; try again"
POOL_GONE_PAUSES_S = (0.0, 0.1, 0.5)
DEAD_ON_ARRIVAL = 3
"""So many sandboxes may turn out dead when they are handed over, before that is an error."""
LOG_VARIABLE = "AGENTGRAD_POOL_LOG"
"""Names a file that gets what a pool's process prints, which is nothing unless it crashes."""


class PoolGoneError(SandboxError):
    """The pool's process ended before it answered."""


class _Connection:
    """Questions to a pool, any number at once."""

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._last = 0
        self._sending = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._reading = asyncio.ensure_future(self._read())
        self.lost = False

    async def _read(self) -> None:
        try:
            while (received := await receive_message(self._connected)) is not None:
                waiter = self._waiting.pop(received[0]["id"], None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(received)
                else:
                    self._give_back(received)
        finally:
            self.lost = True
            self._connected.close()
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(PoolGoneError(POOL_GONE))

    async def ask(self, question: str, **details: Any) -> tuple[dict[str, Any], list[int]]:
        """The answer, and the open files that came with it.

        Raises:
            PoolGoneError: the pool's process ended.
            SandboxError: it answered with an error.
        """
        if self.lost:
            raise PoolGoneError(POOL_GONE)
        self._last += 1
        number = self._last
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with self._sending:
                await send_message(self._connected, {"id": number, "ask": question, **details})
            answer, files = await waiter
        except OSError as error:
            waiter.cancel()
            raise PoolGoneError(POOL_GONE) from error
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())
            waiter.cancel()
            raise
        if "error" in answer:
            _close_all(files)
            raise (SandboxUnavailableError if answer["unavailable"] else SandboxError)(answer["error"])
        return answer, files

    def _give_back(self, received: tuple[dict[str, Any], list[int]]) -> None:
        """An answer that came when its question had been cancelled may bring a sandbox, which nobody wants now."""
        answer, files = received
        _close_all(files)
        if "sandbox" in answer:
            ending = asyncio.ensure_future(self._end(answer["sandbox"]))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end(self, sandbox: str) -> None:
        with contextlib.suppress(SandboxError):  # what is left is the pool's to report and to reap
            await self.ask("end", sandbox=sandbox)

    async def close(self) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading


class PoolFactory(ServedFactory):
    """Starts sandboxes of one kind through the host's pool; made by `create`."""

    def __init__(self, kind: PoolKind, image: str | None, warm: int) -> None:
        super().__init__()
        self.name = kind.backend
        self._kind = kind
        self._image = image
        self._warm = warm
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._left = False

    @classmethod
    async def create(cls, kind: PoolKind, *, image: str | None = None, warm: int = 0) -> Self:
        """A factory, when such sandboxes can be had here. `image` is that of specs that name none; the pool keeps
        `warm` sandboxes of each spec in use ready.

        Raises:
            SandboxUnavailableError: they cannot; one line says why, and what helps.
        """
        factory = cls(kind, image, warm)
        try:
            await asyncio.to_thread(_preflight, kind)
            await factory._ask("check", spec=spec_as_json(factory._own(SandboxSpec())), warm=warm)
        except BaseException:
            await factory.close()
            raise
        return factory

    def _own(self, spec: SandboxSpec) -> SandboxSpec:
        """The spec as the pool, which runs in another folder, must read it."""
        image = self._image if spec.image is None else spec.image
        return replace(spec, image=str(Path(image).resolve()) if image and image.startswith(("./", "../")) else image)

    async def _begin(self, spec: SandboxSpec) -> Started:
        spec = self._own(spec)
        details = {"spec": spec_as_json(spec), "warm": self._warm}
        for attempt in range(1, DEAD_ON_ARRIVAL + 1):
            answer, files = await self._ask("start", **details)
            name: str = answer["sandbox"]
            lease = _PoolLease(self, name)
            try:
                if not files:
                    raise SandboxError(
                        f"{self.name}: no sandbox came: this process has too many files open (ulimit -n)"
                    )
                unwrap = unwrapper() if self._kind.backend == "docker" else None
                connected = socket.socket(fileno=files[0])
                channel = await Channel.open(connected, self.name, unwrap=unwrap, serve=proxy_for(spec))
            except SandboxError:
                await lease.release()
                if attempt == DEAD_ON_ARRIVAL:
                    raise
                continue
            except BaseException:
                await asyncio.shield(lease.release())
                raise
            return Started(channel=channel, lease=lease, variables=answer["variables"], server=SERVER)
        raise AssertionError("the last attempt returns or raises")

    async def _ask(self, question: str, **details: Any) -> tuple[dict[str, Any], list[int]]:
        """Ask the pool; when its process was killed meanwhile, ask the next one."""
        for pause_s in POOL_GONE_PAUSES_S:
            try:
                return await (await self._pool()).ask(question, **details)
            except PoolGoneError:
                # A process that is being killed may still accept connections for a moment.
                await asyncio.sleep(pause_s)
        return await (await self._pool()).ask(question, **details)

    async def _pool(self) -> _Connection:
        async with self._connecting:
            if self._left:
                raise SandboxError(f"{self.name}: the factory is closed; open a new one")
            if self._connection is None or self._connection.lost:
                self._connection = _Connection(await _connect(self._kind))
            return self._connection

    async def pool_state(self) -> dict[str, Any]:
        """`ready`: how many warm sandboxes there are; `pid`: the pool's process."""
        return (await self._ask("state"))[0]

    async def _release(self) -> None:
        self._left = True
        if self._connection is not None:
            with contextlib.suppress(SandboxError):
                await self._connection.ask("leave")
            await self._connection.close()


class _PoolLease:
    def __init__(self, factory: PoolFactory, name: str) -> None:
        self._factory = factory
        self._name = name

    async def release(self) -> None:
        await self._factory._ask("end", sandbox=self._name)

    async def why_gone(self) -> str:
        try:
            return (await self._factory._ask("why", sandbox=self._name))[0]["why"]
        except SandboxError as error:
            return str(error)


def _preflight(kind: PoolKind) -> None:
    """What can be said without starting a process."""
    if kind.backend == "docker":
        check_host()
    elif shutil.which("bwrap") is None:
        raise SandboxUnavailableError("bubblewrap: bwrap is not installed: run apt-get install bubblewrap")


async def _connect(kind: PoolKind) -> socket.socket:
    """A connection to the pool of this host, whose process is started when there is none.

    Raises:
        SandboxUnavailableError: it does not start.
    """
    address, started = kind.address, False
    loop = asyncio.get_running_loop()
    give_up = loop.time() + CONNECT_S
    while True:
        connected = new_socket()
        try:
            connected.connect(address)
            if not peer_is_us(connected):
                raise SandboxUnavailableError("the process that starts sandboxes belongs to another user")
            return connected
        except (ConnectionRefusedError, BlockingIOError) as error:
            connected.close()
            if loop.time() > give_up:
                raise SandboxUnavailableError(
                    f"the process that starts sandboxes does not start; set {LOG_VARIABLE}=FILE to see why"
                ) from error
        except BaseException:
            connected.close()
            raise
        if not started:
            await asyncio.to_thread(_start_process, kind)
            started = True
        await asyncio.sleep(RETRY_S)


def _start_process(kind: PoolKind) -> None:
    """Start the pool as nobody's child and in a session of its own: Ctrl-C is not for it, it ends after its clients."""
    runtime = [] if kind.runtime is None else ["--runtime", kind.runtime]
    log = os.environ.get(LOG_VARIABLE, os.devnull)
    command = [sys.executable, "-m", "envs.sandbox.pool_process", kind.backend, *runtime]
    script = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 &'
    subprocess.run(["/bin/sh", "-c", script, "sh", log, *command], start_new_session=True, check=True)


def _close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)
