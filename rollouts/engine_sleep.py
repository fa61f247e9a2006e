"""May an engine sample now? Between `sleep` and `wake` its GPU memory belongs to somebody else, such as a trainer.

The rules are the same for every engine and on every machine, with or without memory to free, so that a loop that
forgets to wake its engine fails on a laptop too.
"""

from __future__ import annotations

from rollouts.engine import EngineError


class SleepState:
    """Awake, asleep, or awake without weights. Used on one thread only."""

    def __init__(self) -> None:
        self.is_asleep = False
        self._has_weights = True

    def check_can_sample(self) -> None:
        """Raise `EngineError` between `sleep` and `wake`, and before new weights came where they were not kept.

        It is an error and no wait: whoever is to wake the engine may be waiting for this very completion.
        """
        self.check_can_load()
        if not self._has_weights:
            raise EngineError("the engine slept without keeping its weights: call load_weights before it samples")

    def check_can_load(self) -> None:
        """Raise `EngineError` between `sleep` and `wake`: there is no memory to put weights into."""
        if self.is_asleep:
            raise EngineError("the engine is asleep: call wake first")

    def fall_asleep(self, *, keep_weights: bool, requests: int) -> bool:
        """Returns False when it is asleep already. Raises `EngineError` while `requests` run."""
        if self.is_asleep:
            return False
        if requests:
            raise EngineError(f"sleep while {requests} requests run: wait for them, or cancel them")
        self.is_asleep = True
        self._has_weights = self._has_weights and keep_weights
        return True

    def wake(self) -> bool:
        """Returns False when it is awake already."""
        was_asleep, self.is_asleep = self.is_asleep, False
        return was_asleep

    def weights_arrived(self) -> None:
        self._has_weights = True
