"""When our machinery fails: how long to wait before something is tried again, and when to give up the run.

One trajectory that is lost says nothing about the others. All of them lost, one after the other, is an outage: a run
that went on would loop through its tasks, or ask a server that is down thousands of times.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.types import StopReason, Trajectory

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 30.0
_ENOUGH, _ENGINE_WEIGHT = 256, 32
"""So many lost in a row are an outage, where one that the engine lost counts for 32: all have the same engine, but a
few broken tasks lose all their trajectories too, one after the other."""


class OutageError(RuntimeError):
    """Trajectory after trajectory was lost. The message holds the cause of the last one."""


def retry_delay_s(number: int) -> float:
    """How long to wait before a trajectory is begun again that was lost `number` times before.

    >>> retry_delay_s(0), retry_delay_s(1), retry_delay_s(20)
    (0.2, 0.4, 30.0)
    """
    return min(_FIRST_WAIT_S * 2**number, _LONGEST_WAIT_S)


@dataclass(slots=True, kw_only=True)
class Outage:
    """What has been lost since a trajectory last ended as it should.

    `held_until`: nothing new begins before that time, in seconds of the event loop's clock.
    """

    held_until: float = 0.0
    _holds: int = 0
    _lost: int = 0
    _evidence: int = 0
    _begun_before: int = 0

    def hold(self, now: float) -> None:
        """The engine failed a trajectory. While it fails, fewer and fewer begin; those that fail together are one."""
        if now >= self.held_until:
            self.held_until = now + retry_delay_s(self._holds)
            self._holds += 1

    def is_over(self) -> None:
        """A trajectory ended as it should."""
        self.held_until, self._holds, self._lost, self._evidence = 0.0, 0, 0, 0

    def lost(self, trajectory: Trajectory, *, begun: int, oldest: int) -> None:
        """A trajectory is lost for good.

        Args:
            begun: how many trajectories had begun by now.
            oldest: how many had begun before the oldest that is still in flight.

        Raises:
            OutageError: enough were lost in a row, and none is left in flight that had begun before the first of them:
                whoever could still show that it goes well has been lost too.
        """
        if self._lost == 0:
            self._begun_before = begun
        self._lost += 1
        self._evidence += _ENGINE_WEIGHT if trajectory.stop_reason is StopReason.ENGINE_ERROR else 1
        if self._evidence >= _ENOUGH and oldest >= self._begun_before:
            raise OutageError(f"the last {self._lost} trajectories were lost, one after the other: {trajectory.cause}")
