"""Which server gets a request? All turns of a trajectory go to one, where its prefix is cached, and its siblings start
there too while that server is not much fuller than the emptiest."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rollouts.server_check import Checked

_HOMES = 1 << 16
"""So many trajectories and groups are remembered; nobody says when one has ended."""


@dataclass(slots=True, eq=False)
class Server:
    """One server, as we know it now. `lost` is set, with the reason, when it is taken out."""

    address: str
    checked: Checked | None = None
    lost: asyncio.Future[str] | None = None
    reason: str = "not asked yet"
    in_flight: int = 0
    heard_s: float = 0.0
    """When it last answered a request, on the loop's clock."""
    doubt: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to look at its health now."""
    wrong: int = 0
    """Answers in a row that were none."""
    probe: asyncio.Task[None] | None = None
    """The last request for one token that was made to see whether its model stands still."""
    is_unfit: bool = False
    """A sync has left it with half of its weights: nobody looks at it before the next one."""

    @property
    def is_up(self) -> bool:
        return self.lost is not None and not self.lost.done()


class Homes:
    """Where trajectories and groups are at home. `capacity`: requests that one server samples at once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._homes: OrderedDict[str, Server] = OrderedDict()

    def choose(self, servers: Sequence[Server], trajectory_id: str, avoid: Collection[Server]) -> Server:
        """The server for a trajectory's request: one that is up, and none of `avoid` where there is another."""
        up = [server for server in servers if server.is_up]
        up = [server for server in up if server not in avoid] or up
        group_id = trajectory_id.rpartition("/")[0]
        chosen = self._homes.get(trajectory_id)
        if chosen not in up:
            chosen = min(up, key=lambda server: server.in_flight)
            sibling = self._homes.get(group_id)
            if sibling in up and sibling.in_flight <= chosen.in_flight + self._capacity // 4:
                chosen = sibling
        assert chosen is not None
        for name in (trajectory_id, group_id):
            if name:
                self._homes[name] = chosen
                self._homes.move_to_end(name)
        while len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        return chosen
