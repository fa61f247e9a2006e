"""The warm pool: sandboxes that were started before anybody asked, so that nobody waits for a start.

It is bounded, never takes a sandbox back, looks whether one still lives before it hands it out, and starts only a few
at a time: what the kernel or a daemon does for one start slows every other one down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace

from envs.sandbox import wire
from envs.sandbox.base import SandboxError, SandboxSpec
from envs.sandbox.launch import Launched, Launcher

MAX_WARM = 64
"""Of all kinds of spec together."""
MAX_STARTING = min(16, max(4, 2 * (os.cpu_count() or 1)))
FORGET_S = 600.0
"""A stock that nobody has used for so long is given up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""After a failed start that nobody waited for."""


@dataclass(slots=True)
class _Stock:
    """The sandboxes of one spec."""

    spec: SandboxSpec
    target: int = 0
    ready: deque[Launched] = field(default_factory=deque)
    waiters: deque[asyncio.Future[Launched]] = field(default_factory=deque)
    starting: int = 0
    used_at: float = 0.0
    pause_s: float = 0.0
    not_before: float = 0.0

    def wanted(self, now: float) -> int:
        """How many more should be starting: first for those who wait, then for the shelf."""
        shelf = self.target - len(self.ready) if now >= self.not_before else 0
        return len(self.waiters) + max(0, shelf) - self.starting


class Pool:
    """Hands out sandboxes of one back-end."""

    def __init__(self, launcher: Launcher, *, max_warm: int = MAX_WARM, max_starting: int = MAX_STARTING) -> None:
        self._launcher = launcher
        self._max_warm = max_warm
        self._max_starting = max_starting
        self._stocks: dict[str, _Stock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._closed = False

    def expect(self, spec: SandboxSpec, warm: int) -> None:
        """Somebody will ask for such sandboxes: keep `warm` of them ready."""
        stock = self._stock(spec)
        stock.target = max(stock.target, warm)
        self._top_up()

    async def take(self, spec: SandboxSpec, warm: int) -> tuple[Launched, bool]:
        """A sandbox without files, and whether it was ready; the taker ends it. `warm` as in `expect`.

        Raises:
            SandboxError: it could not be started.
        """
        stock = self._stock(spec)
        stock.target = max(stock.target, warm)
        while stock.ready:
            launched = stock.ready.popleft()
            if is_alive(launched.connected):
                self._top_up()
                return launched, True
            self._later(_end(launched))
        waiter: asyncio.Future[Launched] = asyncio.get_running_loop().create_future()
        stock.waiters.append(waiter)
        self._top_up()
        try:
            return await waiter, False
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._later(_end(waiter.result()))
            raise

    def _stock(self, spec: SandboxSpec) -> _Stock:
        if self._closed:
            raise SandboxError("the pool is closed")
        bare = replace(spec, files={})
        stock = self._stocks.setdefault(repr(bare), _Stock(bare))
        stock.used_at = time.monotonic()
        return stock

    def _top_up(self) -> None:
        """Start what is wanted, as far as the bounds allow: sandboxes that somebody waits for before all others."""
        now = time.monotonic()
        self._forget(now)
        order = sorted(self._stocks.values(), key=lambda stock: -len(stock.waiters))
        for stock in order:
            while stock.wanted(now) > 0 and self._starting < self._max_starting:
                if stock.starting >= len(stock.waiters) and self._warm() >= self._max_warm:
                    break
                stock.starting += 1
                self._starting += 1
                self._later(self._start(stock))

    def _warm(self) -> int:
        return sum(len(stock.ready) + max(0, stock.starting - len(stock.waiters)) for stock in self._stocks.values())

    def _forget(self, now: float) -> None:
        for key, stock in list(self._stocks.items()):
            if now - stock.used_at > FORGET_S and not stock.waiters and not stock.starting:
                del self._stocks[key]
                for launched in stock.ready:
                    self._later(_end(launched))

    def beat(self) -> None:
        """Give a sign of life to what is ready; whoever takes one does it from then on."""
        for stock in self._stocks.values():
            for launched in stock.ready:
                with contextlib.suppress(OSError):  # a dead one is found when somebody takes it
                    launched.connected.send(wire.frame(wire.BEAT, 0), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def _start(self, stock: _Stock) -> None:
        launched, error = None, None
        try:
            launched = await self._launcher.launch(stock.spec)
        except SandboxError as failure:
            error = failure
        finally:
            stock.starting -= 1
            self._starting -= 1
        while stock.waiters and stock.waiters[0].done():  # cancelled meanwhile
            stock.waiters.popleft()
        if launched is not None and self._closed:
            await _end(launched)
        elif launched is not None:
            stock.pause_s = 0.0
            if stock.waiters:
                stock.waiters.popleft().set_result(launched)
            else:
                stock.ready.append(launched)
        elif error is not None and stock.waiters:
            stock.waiters.popleft().set_exception(error)
        elif error is not None:
            # Nobody waited; whoever asks next is told. Until then there is a pause, so that nothing is hammered.
            stock.pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * stock.pause_s))
            stock.not_before = time.monotonic() + stock.pause_s
        self._top_up()

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def ready(self) -> int:
        """How many sandboxes are ready now."""
        return sum(len(stock.ready) for stock in self._stocks.values())

    async def empty(self) -> None:
        """End everything that is ready and wait for what is starting; the pool goes on."""
        for stock in self._stocks.values():
            stock.target = 0
        while self._tasks or self.ready:
            for stock in self._stocks.values():
                while stock.ready:
                    self._later(_end(stock.ready.popleft()))
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """End everything that nobody has taken."""
        self._closed = True
        await self.empty()


async def _end(launched: Launched) -> None:
    with contextlib.suppress(SandboxError):  # what is left is reaped
        await launched.end()


def is_alive(connected: socket.socket) -> bool:
    """Whether the other end is still there, by looking at what can be read, which stays unread."""
    try:
        return bool(connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
