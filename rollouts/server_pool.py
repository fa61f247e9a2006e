"""Which servers live, and what happens when one dies? Which of them gets a request, `server_routing` says.

Every server is watched: one that is gone, hangs or fails is taken out, at
which its requests in flight end with a `ServerFault`; it is checked as at the start before it comes back. A server can
be well by its health while its model stands still: one that answers nothing while a request waits is asked for a token.
Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rollouts.engine import EngineError
from rollouts.server_check import Checked, Wanted, check_server, check_weights_changed, differing, probe_ids
from rollouts.server_http import ServerFault, call, check_health
from rollouts.server_patience import Patience
from rollouts.server_routing import Homes, Server

_LOG = logging.getLogger(__name__)

_WRONG_IN_A_ROW = 3
"""So many answers that were none take a server out: one may be the doing of its request, as overflowing logits are."""


@dataclass(slots=True)
class ServerCounts:
    """What happened so far.

    resent: requests sent once more, whatever the reason.
    lost, returned: times that a server was taken out, and that one came back.
    """

    resent: int = 0
    lost: int = 0
    returned: int = 0

    def __str__(self) -> str:
        """Worked example: "requests sent again: 3; servers lost: 2, back again: 1"."""
        return f"requests sent again: {self.resent}; servers lost: {self.lost}, back again: {self.returned}"


class ServerPool:
    """The servers of one engine; built and used on the loop that watches them.

    capacity: requests that one server samples at once.
    accept: says whether a server that comes back has the right weights; raises `ValueError` with the reason.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        client: httpx.AsyncClient,
        wanted: Wanted,
        capacity: int,
        patience: Patience,
        accept: Callable[[Checked], None],
    ) -> None:
        self._client = client
        self.wanted = wanted
        self._patience = patience
        self._accept = accept
        self._homes = Homes(capacity)
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._closed = False
        self.servers = [Server(address) for address in addresses]
        self.counts = ServerCounts()

    @property
    def is_up(self) -> bool:
        """Whether any server is."""
        return any(server.is_up for server in self.servers)

    @property
    def causes(self) -> str:
        """Why each server is out, or that it is up."""
        return "; ".join(f"{server.address}: {server.reason}" for server in self.servers)

    async def open(self) -> None:
        """Check every server, and watch them from then on.

        Raises:
            ValueError: a server is not what is wanted.
            EngineError: a server does not answer.
        """
        checks = await asyncio.gather(*(self._check(server) for server in self.servers), return_exceptions=True)
        for server, found in zip(self.servers, checks, strict=True):
            if isinstance(found, ServerFault):
                raise EngineError(
                    f"server {server.address}: {found}; start it (see python -m scripts.serve --help), or take it out "
                    "of engine.servers"
                ) from found
            if isinstance(found, BaseException):
                raise found
            self._check_same_weights(server, found)
            self._take_in(server, found)
        self._watchers = [asyncio.create_task(self._watch(server)) for server in self.servers]

    async def reachable(self) -> list[Server]:
        """Those that are up, and those that are not but are well: they may have come back without the last weights."""

        async def is_well(server: Server) -> bool:
            if server.is_up:
                return True
            try:
                await check_health(self._client, server.address, timeout_s=self._patience.last_look_s)
            except ServerFault as fault:
                server.reason = str(fault)
                return False
            return True

        well = await asyncio.gather(*map(is_well, self.servers))
        return [server for server, is_there in zip(self.servers, well, strict=True) if is_there]

    def lose(self, server: Server, reason: str, *, is_unfit: bool) -> None:
        """Take it out, at which its requests go elsewhere; `is_unfit`: until it has been given weights."""
        server.is_unfit, server.checked = is_unfit, None if is_unfit else server.checked
        if server.is_up:
            self._take_out(server, reason)
        server.reason = reason

    async def weights_changed(self, servers: Sequence[Server]) -> None:
        """See that servers which took new weights have the same ones, and take in those that were out.

        Raises:
            EngineError: one does not answer, or its weights differ from another's; it is out.
        """
        now_s = asyncio.get_running_loop().time()
        for server in servers:
            server.heard_s = now_s  # it stood still, and was told to
            server.is_unfit = False
        found = await asyncio.gather(*map(self._look_again, servers), return_exceptions=True)
        for server in servers:
            server.checked = None
        wrong: list[str] = []
        for server, checked in zip(servers, found, strict=True):
            try:
                if isinstance(checked, BaseException):
                    raise checked
                self._accept(checked)
                self._check_same_weights(server, checked)
                server.checked = checked
                await self._return(server, checked)
            except (ServerFault, EngineError, ValueError) as error:
                self.lose(server, str(error), is_unfit=True)
                wrong.append(f"server {server.address}: {error}")
        if wrong:
            raise EngineError(f"after its weights changed: {'; '.join(wrong)}")

    async def _look_again(self, server: Server) -> Checked:
        if not server.is_up or server.checked is None:
            return await self._check(server)
        timeout_s = self._patience.request_timeout_s
        return await check_weights_changed(
            self._client, server.address, self.wanted, server.checked, timeout_s=timeout_s
        )

    async def close(self) -> None:
        """Watch no more, and end what is in flight with a `ServerFault`; `pick` refuses from now on."""
        self._closed = True
        tasks = [*self._watchers, *(server.probe for server in self.servers if server.probe is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            if server.lost is not None and not server.lost.done():
                server.lost.set_result("the engine is closed")
        async with self._changed:
            self._changed.notify_all()

    async def pick(self, trajectory_id: str, *, avoid: Collection[Server] = ()) -> Server:
        """The server for a request, another one than those of `avoid` where there is one. Waits while there is none.

        Raises:
            EngineError: none came back in time, or the engine is closed.
        """
        try:
            async with asyncio.timeout(self._patience.recovery_s), self._changed:
                await self._changed.wait_for(lambda: self._closed or self.is_up)
        except TimeoutError as error:
            raise EngineError(
                f"no server came back within {self._patience.recovery_s:g} s ({self.causes}); start one again"
            ) from error
        if self._closed:
            raise EngineError("the server engine is closed")
        return self._homes.choose(self.servers, trajectory_id, avoid)

    async def send(self, server: Server, path: str, body: Any) -> dict[str, Any]:
        """The server's answer, unless it is lost before it came.

        Raises:
            ServerFault: it did not answer; where that says that it is lost, it is taken out.
            EngineError: it refused the request.
        """
        lost = server.lost
        assert lost is not None
        timeout_s = self._patience.request_timeout_s
        began_s = asyncio.get_running_loop().time()
        server.in_flight += 1
        asked = asyncio.create_task(call(self._client, server.address, path, body, timeout_s=timeout_s))
        try:
            done, _ = await asyncio.wait((asked, lost), timeout=timeout_s / 2, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._doubt_model(server, began_s)
                await asyncio.wait((asked, lost), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ServerFault(lost.result())
            fault = asked.exception()
            if isinstance(fault, ServerFault):
                self._judge(server, fault, began_s)
            else:
                server.heard_s = asyncio.get_running_loop().time()
            return asked.result()
        finally:
            # In every case before anything else is tried, so that no answer can come later: the connection closes here.
            server.in_flight -= 1
            asked.cancel()
            await asyncio.wait((asked,))

    def has_other(self, servers: Collection[Server]) -> bool:
        """Whether another one than these is up."""
        return any(other.is_up for other in self.servers if other not in servers)

    def was_wrong(self, server: Server, reason: str) -> None:
        """It answered a request that was right with no answer. A few times in a row, and it is taken out while there is
        another one, though it may pass its check: each time for longer, until it has given a right answer."""
        if server.is_up:
            server.wrong += 1
            if server.wrong >= _WRONG_IN_A_ROW and self.has_other((server,)):
                self._take_out(server, reason)

    async def answers(self, server: Server, *, since_s: float) -> bool:
        """Whether it has answered anybody lately and since then, or soon gives one token to us."""
        since_s = max(since_s, asyncio.get_running_loop().time() - self._patience.last_look_s)
        if server.heard_s < since_s:
            self._doubt_model(server, since_s)
            if server.probe is not None:
                await asyncio.wait((server.probe,), timeout=self._patience.last_look_s)
        return server.is_up and server.heard_s >= since_s

    def _judge(self, server: Server, fault: ServerFault, began_s: float) -> None:
        """What the fault of a request that was sent at `began_s` says about its server."""
        if fault.kind == "gone" or (fault.kind == "hung" and server.heard_s < began_s):
            self._take_out(server, str(fault))
        elif fault.kind == "failed":
            server.doubt.set()  # perhaps only this connection broke: its health says

    def _doubt_model(self, server: Server, began_s: float) -> None:
        """Ask for one token, where nothing was heard since `began_s`. It goes on when the request that waits is
        cancelled, as the clock of its trajectory does: else a model that stands still would never be found out."""
        if server.is_up and server.heard_s < began_s and (server.probe is None or server.probe.done()):
            server.probe = asyncio.create_task(self._probe(server))

    async def _probe(self, server: Server) -> None:
        lost, checked, began_s = server.lost, server.checked, asyncio.get_running_loop().time()
        assert checked is not None
        wire, ids = checked.wire, probe_ids(self.wanted.vocab_size)
        body = wire.ask_top(ids, temperature=1.0, model=self.wanted.adapter)
        try:
            # As long as the request has left: a batch that is full of long completions lets the probe wait too.
            await call(self._client, server.address, wire.path, body, timeout_s=self._patience.request_timeout_s / 2)
            server.heard_s = asyncio.get_running_loop().time()
        except ServerFault as fault:
            if server.lost is lost:  # not one that went, and came back meanwhile
                self._judge(server, fault, began_s)
        except EngineError as error:
            if server.lost is lost:
                self.was_wrong(server, str(error))

    async def _watch(self, server: Server) -> None:
        while True:
            try:
                await (self._until_lost(server) if server.is_up else self._until_back(server))
            except Exception:  # a watcher that ended would leave its server out, or hung, for ever
                _LOG.exception("server %s: watching it failed; it goes on", server.address)
                await asyncio.sleep(self._patience.health_interval_s)

    async def _until_lost(self, server: Server) -> None:
        failures = 0
        while server.is_up:
            try:
                async with asyncio.timeout(self._patience.health_interval_s if not failures else 0.1):
                    await server.doubt.wait()
            except TimeoutError:
                pass
            server.doubt.clear()
            try:
                await check_health(self._client, server.address, timeout_s=self._patience.health_timeout_s)
                failures = 0
            except ServerFault as fault:
                silent_s = asyncio.get_running_loop().time() - server.heard_s
                if fault.kind == "hung" and silent_s < self._patience.health_timeout_s:
                    continue  # it is busy, and answers others
                failures += 1
                if fault.kind == "gone" or failures == 2:
                    self._take_out(server, str(fault))

    async def _until_back(self, server: Server) -> None:
        times = max(0, server.wrong - _WRONG_IN_A_ROW)
        while not server.is_up:
            await asyncio.sleep(self._patience.backoff(times))
            times += 1
            if server.is_unfit:
                continue
            try:
                await check_health(self._client, server.address, timeout_s=self._patience.health_timeout_s)
                checked = await self._check(server)
                self._accept(checked)
                self._check_same_weights(server, checked)
                if server.is_unfit:  # a sync failed meanwhile
                    continue
            except (ServerFault, ValueError, EngineError) as error:
                if str(error) != server.reason and not isinstance(error, ServerFault):
                    _LOG.warning("server %s stays out: %s", server.address, error)
                server.reason = str(error)
                continue
            await self._return(server, checked)

    async def _return(self, server: Server, checked: Checked) -> None:
        if server.is_up:
            return
        self._take_in(server, checked)
        self.counts.returned += 1
        _LOG.warning("server %s is back", server.address)
        async with self._changed:
            self._changed.notify_all()

    async def _check(self, server: Server) -> Checked:
        try:
            return await check_server(self._client, server.address, self.wanted)
        except EngineError as error:
            raise ValueError(f"server {server.address}: {error}") from error

    def _check_same_weights(self, server: Server, checked: Checked) -> None:
        for other in self.servers:  # those that are out too, and what this one was before
            if other.checked is None or other.checked.version != checked.version:
                continue
            difference = differing(checked.scores, other.checked.scores)
            if difference is not None:
                raise ValueError(
                    f"server {server.address}: its logprobs differ from those of {other.address} by {difference:.2g} "
                    f"nats in the mean, and both call their weights {checked.version!r}; start it with the same model"
                )

    def _take_in(self, server: Server, checked: Checked) -> None:
        server.checked, server.reason = checked, "up"
        server.lost = asyncio.get_running_loop().create_future()

    def _take_out(self, server: Server, reason: str) -> None:
        if not server.is_up:
            return
        assert server.lost is not None
        server.reason = reason
        server.lost.set_result(reason)
        server.doubt.set()
        self.counts.lost += 1
        then = "are sent to another one" if self.is_up else "wait until a server is back: no other one is up"
        _LOG.warning("server %s is out (%s); its requests %s", server.address, reason, then)
