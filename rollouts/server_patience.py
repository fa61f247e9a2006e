"""How long are servers waited for? The numbers, and how they follow from the time that a trajectory has.

What is done when the time is over is in `server_pool` and `engine_server`.
"""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_S = 4.0
"""A server that is well and has a full batch may need half of it for one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long servers are waited for.

    health_interval_s, health_timeout_s: how often each is asked whether it is well, and for how long; two failures in
        a row take it out, a refused connection at once.
    request_timeout_s: a request that takes longer is sent again; its server hangs, and is taken out, unless it
        answered another one meanwhile. After half of it, a server that answered nothing is asked for one token, for the
        other half; no answer takes it out too, even where the request was cancelled before.
    attempts: times that one completion is asked for in all.
    backoff_s: before a failed request is sent again to a server that had it, and before a lost server is looked at
        again; twice as long each further time, up to 15 s.
    recovery_s: how long requests wait while there is no server at all. The scheduler begins the trajectory again, and
        waits longer.
    sync_timeout_s: for giving new weights to all servers; one that has not taken them by then has failed.
    last_look_s: how long a server that is silent is asked for one token when the clock of a trajectory cancels its
        request: the answer says whether the policy sampled long, or the server stands still.
    """

    health_interval_s: float = 2.0
    health_timeout_s: float = 10.0
    request_timeout_s: float = 600.0
    attempts: int = 5
    backoff_s: float = 0.5
    recovery_s: float = 45.0
    last_look_s: float = 5.0
    sync_timeout_s: float = 300.0

    @classmethod
    def within(cls, wall_clock_s: float) -> Patience:
        """The defaults, but a request has at most half of `limits.wall_clock_s`, and the wait for a server a quarter.
        A request has 4 s at least, for a clock that is shorter says nothing about a server.

        So a server that hangs is known before the clock of a trajectory that began with it ends, and another one has
        time for its request. A later turn may be out of time before: then `Errand.blame` says that it was no fault of
        the policy.

        Worked example: of 120 s, a request has 60 and the wait 30, and a first turn that meets the only server hung
        fails as the engine's after 90.
        """
        usual = cls()
        return cls(
            request_timeout_s=min(usual.request_timeout_s, max(wall_clock_s / 2, _LEAST_S)),
            recovery_s=min(usual.recovery_s, wall_clock_s / 4),
        )

    def backoff(self, times: int) -> float:
        return min(self.backoff_s * 2**times, 15.0)
