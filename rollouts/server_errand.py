"""One request on its way to an answer: which servers it was sent to, what went wrong there, and whose fault it is when
its time is over.

A server's fault must not be graded as the policy's. So when the clock of a trajectory cancels a request, what it met
until then says whether a server kept it waiting (`Errand.blame`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rollouts.engine import EngineError
from rollouts.server_http import RefusedError, ServerFault
from rollouts.server_patience import Patience
from rollouts.server_pool import ServerPool
from rollouts.server_routing import Server
from rollouts.server_wire import AbortedError

T = TypeVar("T")


class Errand(Generic[T]):
    """A request that any server may answer. Its methods run on the loop of the servers.

    Args:
        what: what messages call it.
        trajectory_id: whose prefix it continues; "" = nobody's.
        ask: sends it to one server.
        check: raises `EngineError` where nothing may be asked now.
    """

    def __init__(
        self,
        what: str,
        trajectory_id: str,
        ask: Callable[[Server], Awaitable[T]],
        *,
        pool: ServerPool,
        patience: Patience,
        check: Callable[[], None],
    ) -> None:
        self._what = what
        self._trajectory_id = trajectory_id
        self._ask = ask
        self._pool = pool
        self._patience = patience
        self._check = check
        self._faults: list[str] = []
        self._server: Server | None = None
        self._sent_s = 0.0

    async def run(self) -> T:
        """The answer of one server, whichever gives it first. Whatever else one says, another one is asked, a bounded
        number of times: a server that is broken answers at once, is the emptiest therefore, and would swallow all work.

        Raises:
            EngineError: two servers refused the request; none that is up answers it rightly; every attempt failed; or
                no server was up for too long.
        """
        tried: list[Server] = []
        wrong: dict[Server, EngineError] = {}
        while True:
            self._check()
            server = await self._pool.pick(self._trajectory_id, avoid={*tried[-1:], *wrong})
            if server in tried:  # those that have not been asked are asked at once
                await asyncio.sleep(self._patience.backoff(len(tried) - 1) * random.uniform(0.5, 1.5))
            tried.append(server)
            self._server, self._sent_s = server, asyncio.get_running_loop().time()
            try:
                answer = await self._ask(server)
            except (ServerFault, AbortedError) as fault:
                self._faults.append(f"{server.address}: {fault}")
            except EngineError as error:
                self._faults.append(f"{server.address}: {error}")
                wrong[server] = error
                if not isinstance(error, RefusedError):
                    self._pool.was_wrong(server, str(error))
                refusals = sum(isinstance(error, RefusedError) for error in wrong.values())
                if refusals == 2 or not self._pool.has_other(wrong):
                    raise EngineError(f"{self._what}: server {server.address}: {error}") from error
            else:
                server.wrong = 0
                for other, error in wrong.items():
                    if isinstance(error, RefusedError) and other is not server:  # this one did not refuse it
                        self._pool.was_wrong(other, str(error))
                return answer
            if len(self._faults) == self._patience.attempts:
                raise EngineError(f"{self._what} was given up after {self._tries}")
            self._pool.counts.resent += 1

    async def blame(self) -> str | None:
        """What the servers did to a request that was cancelled, in words; None where it was only a long one.

        A server that has answered nobody lately is asked for one token: one that samples gives it
        soon, however long the completion is.
        """
        if self._faults:
            return f"{self._what} was out of time after {self._tries}"
        if self._server is None:
            return None if self._pool.is_up else f"{self._what} was out of time with no server up ({self._pool.causes})"
        if await self._pool.answers(self._server, since_s=self._sent_s):
            return None
        return f"{self._what} was out of time, and server {self._server.address} answers nobody"

    @property
    def _tries(self) -> str:
        return f"{len(self._faults)} attempts ({'; '.join(self._faults)})"
