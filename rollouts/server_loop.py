"""Where do the requests of the server engine run? On an event loop of their own, on one thread.

So servers are watched while the caller's loop is busy with tools, an engine outlives the caller's loop (`asyncio.run`
twice with one engine), and it can be opened from inside a running loop. It knows nothing of servers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rollouts.engine import EngineError

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._lock = threading.Lock()  # orders `run` against `stop`: nothing is handed to a loop that has ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; blocks the calling thread."""
        return self._submit(work).result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs on this loop; cancelling the caller cancels it.

        Raises:
            EngineError: the loop was stopped.
        """
        return await asyncio.wrap_future(self._submit(work))

    def stop(self) -> None:
        """End the loop; what still runs on it is cancelled, and has ended when this returns. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise EngineError(f"the {self._name} engine is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
