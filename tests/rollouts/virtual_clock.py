"""An event loop whose clock jumps: nobody waits, and what happens when is the same in every run.

For code that only sleeps and waits for others in this process; nothing outside of it has a part in this time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

Result = TypeVar("Result")


class StuckError(RuntimeError):
    """Everybody waits, and nothing is going to happen."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, it moves the clock to where the wait would have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise StuckError("every task waits, and no timer is set")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.failures: list[Mapping[str, Any]] = []
        """What would only have been logged."""
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def time(self) -> float:
        return self._jumping.now


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives. Nothing that it started may be left, and no error may have been swallowed."""

    async def run() -> Result:
        result = await work
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"
        return result

    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(run())
    assert not loop.failures
    return result
