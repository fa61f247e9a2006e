"""The warm pool: sandboxes that were started before anybody asked, so that nobody waits for a start.

It is bounded, never takes a sandbox back, looks whether one still lives before it hands it out, and starts only a few
at a time: what the kernel or a daemon does for one start slows every other one down. Who has waited longest comes
first, whatever the spec; a spec whose image must be pulled first takes no place from others meanwhile.
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
MAX_PREPARING = 8
"""A pull or a build holds one of the Docker client's threads, of which starts need some too."""
FORGET_S = 600.0
"""A stock that nobody has used for so long is given up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""After a failed start that nobody waited for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """Somebody who waits for a sandbox. Numbers grow: the smallest has waited longest."""

    number: int
    given: asyncio.Future[Launched]


@dataclass(slots=True, eq=False)
class _Stock:
    """The sandboxes of one spec. `used` is the number of its last use, which grows over all stocks."""

    spec: SandboxSpec
    target: int = 0
    ready: deque[Launched] = field(default_factory=deque)
    waiters: deque[_Waiter] = field(default_factory=deque)
    starting: int = 0
    prepared: bool = False
    preparing: bool = False
    used: int = 0
    used_at: float = 0.0
    pause_s: float = 0.0
    not_before: float = 0.0

    @property
    def shelf(self) -> int:
        """How many are ready, or will be when everybody who waits has got one."""
        return len(self.ready) + max(0, self.starting - len(self.waiters))

    def lacks_warm(self, now: float) -> bool:
        return now >= self.not_before and self.starting >= len(self.waiters) and self.shelf < self.target

    def tell_failure(self, error: SandboxError, waiters: int) -> None:
        """To so many of those who wait. Whoever asks next tries again; with nobody there, after a pause only."""
        if not self.waiters:
            self.pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self.pause_s))
            self.not_before = time.monotonic() + self.pause_s
        for _ in range(waiters):
            waiter = self.next_waiter()
            if waiter is not None:
                waiter.given.set_exception(error)

    def next_waiter(self) -> _Waiter | None:
        """Whoever has waited longest, who waits no more then."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.given.done():  # it is done when its taker has been cancelled a moment ago
                return waiter
        return None


class Pool:
    """Hands out sandboxes of one back-end."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        max_warm: int = MAX_WARM,
        max_starting: int = MAX_STARTING,
        forget_s: float = FORGET_S,
    ) -> None:
        self._launcher = launcher
        self._max_warm = max_warm
        self._max_starting = max_starting
        self._forget_s = forget_s
        self._stocks: dict[str, _Stock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._preparing: set[asyncio.Task[None]] = set()
        self._may_prepare = asyncio.Semaphore(MAX_PREPARING)
        self._emptying: set[asyncio.Future[None]] = set()
        self._starting = 0
        self._uses = 0
        self._closed = False

    def expect(self, spec: SandboxSpec, warm: int) -> None:
        """Somebody will ask for such sandboxes: keep `warm` of them ready."""
        self._use(spec, warm)
        self._top_up()

    async def take(self, spec: SandboxSpec, warm: int) -> tuple[Launched, bool]:
        """A sandbox without files, and whether it was ready; the taker ends it. `warm` as in `expect`.

        Raises:
            SandboxError: it could not be started, or the pool was closed.
        """
        stock = self._use(spec, warm)
        while stock.ready:
            launched = stock.ready.popleft()
            if is_alive(launched.connected):
                self._top_up()
                return launched, True
            self._later(_end(launched))
        waiter = _Waiter(stock.used, asyncio.get_running_loop().create_future())
        stock.waiters.append(waiter)
        self._top_up()
        try:
            return await waiter.given, False
        except asyncio.CancelledError:
            if waiter in stock.waiters:
                stock.waiters.remove(waiter)
            elif not waiter.given.cancelled() and waiter.given.exception() is None:
                self._later(_end(waiter.given.result()))
            raise

    def _use(self, spec: SandboxSpec, warm: int) -> _Stock:
        if self._closed:
            raise SandboxError("the pool is closed")
        while self._emptying:
            self._emptying.pop().set_result(None)
        bare = replace(spec, files={})
        stock = self._stocks.setdefault(repr(bare), _Stock(bare))
        stock.target = max(stock.target, warm)
        self._uses += 1
        stock.used, stock.used_at = self._uses, time.monotonic()
        return stock

    # --- which one next ---

    def _top_up(self) -> None:
        """Start what is wanted, as far as the bounds allow: sandboxes that somebody waits for before all others."""
        if self._closed:
            return
        now = time.monotonic()
        for stock in self._stocks.values():
            if not stock.prepared and not stock.preparing and (stock.waiters or stock.lacks_warm(now)):
                stock.preparing = True
                self._later(self._prepare(stock), self._preparing)
        while self._starting < self._max_starting:
            stock = self._waited_for() or self._lacking_warm(now)
            if stock is None:
                break
            stock.starting += 1
            self._starting += 1
            self._later(self._start(stock))

    def _waited_for(self) -> _Stock | None:
        """The stock of whoever has waited longest without that something was starting for him."""
        waiting = [stock for stock in self._stocks.values() if stock.prepared and stock.starting < len(stock.waiters)]
        return min(waiting, key=lambda stock: stock.waiters[stock.starting].number, default=None)

    def _lacking_warm(self, now: float) -> _Stock | None:
        """The stock used last that wants a warm one and can have it."""
        lacking = [stock for stock in self._stocks.values() if stock.prepared and stock.lacks_warm(now)]
        for stock in sorted(lacking, key=lambda stock: -stock.used):
            if self._warm() < self._max_warm or self._evict_for(stock):
                return stock
        return None

    def _evict_for(self, stock: _Stock) -> bool:
        """Make room for one more warm sandbox where all places are taken, if another stock should give one.

        That is the least recently used one of those that are out of use, or have more than this one, so that all in use
        get equal parts. Nothing goes back and forth: what is out of use gets only what nobody else wants.
        """
        if self._out_of_use(stock):
            return False
        giving = [
            other
            for other in self._stocks.values()
            if other.ready and (self._out_of_use(other) or len(other.ready) > stock.shelf + 1)
        ]
        if not giving:
            return False
        self._later(_end(min(giving, key=lambda other: other.used).ready.popleft()))
        return True

    def _out_of_use(self, stock: _Stock) -> bool:
        """Whether there have been as many uses of others since its last one as there are places."""
        return self._uses - stock.used > self._max_warm

    def _warm(self) -> int:
        return sum(stock.shelf for stock in self._stocks.values())

    # --- starts ---

    async def _prepare(self, stock: _Stock) -> None:
        """What a spec's first start needs, outside of the places for starts: it may take minutes."""
        try:
            async with self._may_prepare:
                await self._launcher.prepare(stock.spec)
            stock.prepared = True
        except Exception as error:
            stock.tell_failure(self._named(error), len(stock.waiters))
        finally:
            stock.preparing = False
        self._top_up()

    async def _start(self, stock: _Stock) -> None:
        launched, error = None, None
        try:
            launched = await self._launcher.launch(stock.spec)
        except Exception as failure:
            error = self._named(failure)
        finally:
            stock.starting -= 1
            self._starting -= 1
        if launched is not None:
            stock.pause_s = 0.0
            self._place(stock, launched)
        elif error is not None:
            stock.prepared = False  # perhaps somebody removed the image
            stock.tell_failure(error, 1)
        self._top_up()

    def _place(self, stock: _Stock, launched: Launched) -> None:
        """Give a new sandbox to whoever waits, else to the shelf, else to nobody."""
        waiter = stock.next_waiter()
        if waiter is not None:
            waiter.given.set_result(launched)
        elif not self._closed and len(stock.ready) < stock.target and self.ready < self._max_warm:
            stock.ready.append(launched)
        else:
            self._later(_end(launched))

    def _named(self, error: Exception) -> SandboxError:
        """`error` as one that takers expect: whatever happens, they must hear of it."""
        if isinstance(error, SandboxError):
            return error
        named = SandboxError(f"{self._launcher.name}: a sandbox could not be started: {type(error).__name__}: {error}")
        named.__cause__ = error
        return named

    def _later(self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if tasks is None else tasks
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # --- from time to time, and at the end ---

    def beat(self) -> None:
        """Give a sign of life to what is ready; whoever takes one does it from then on."""
        for stock in self._stocks.values():
            for launched in stock.ready:
                with contextlib.suppress(OSError):  # a dead one is found when somebody takes it
                    launched.connected.send(wire.frame(wire.BEAT, 0), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def forget(self) -> None:
        """Give up the stocks that nobody has used for long."""
        now = time.monotonic()
        for key, stock in list(self._stocks.items()):
            busy = stock.waiters or stock.starting or stock.preparing
            if now - stock.used_at > self._forget_s and not busy:
                del self._stocks[key]
                for launched in stock.ready:
                    self._later(_end(launched))

    @property
    def ready(self) -> int:
        """How many sandboxes are ready now."""
        return sum(len(stock.ready) for stock in self._stocks.values())

    async def empty(self) -> None:
        """End everything that is ready and wait for what is starting; the pool goes on.

        It stops as soon as somebody asks again: what is ready then is his.
        """
        for stock in self._stocks.values():
            stock.target = 0
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._emptying.add(asked)
        try:
            while not asked.done() and (self._tasks or self.ready):
                for stock in self._stocks.values():
                    while stock.ready:
                        self._later(_end(stock.ready.popleft()))
                await asyncio.wait({asked, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._emptying.discard(asked)
            asked.cancel()

    async def close(self) -> None:
        """End everything that nobody has taken; whoever waits is told."""
        self._closed = True
        for stock in self._stocks.values():
            stock.tell_failure(SandboxError("the pool is closed"), len(stock.waiters))
        for task in list(self._preparing):
            task.cancel()
        await self.empty()
        await asyncio.gather(*self._preparing, return_exceptions=True)


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
