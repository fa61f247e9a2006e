"""Where does an engine run? On one thread of its own, so that the event loop stays free for tools.

The thread runs jobs that are handed in, in order, and takes steps while the engine has work; a job runs between
two steps, never during one. It knows nothing of models or tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from rollouts.engine import EngineError

T = TypeVar("T")


class EngineThread:
    """Runs `step` while `has_work`, and jobs between the steps. All three callables run on the thread only.

    A step that raises breaks the engine: every later job is refused. `ended` is called last, with the reason, to
    tell whoever still waits.
    """

    def __init__(
        self,
        name: str,
        *,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        ended: Callable[[EngineError], None],
    ) -> None:
        self._name = name
        self._has_work = has_work
        self._step = step
        self._ended = ended
        self._error: EngineError | None = None
        self._lock = threading.Lock()  # orders `post` against the end of the thread: no job is left behind
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` before the next step. One that raises breaks the engine, as a step does.

        Raises:
            EngineError: the engine is closed or broken.
        """
        with self._lock:
            if self._error is not None:
                raise EngineError(str(self._error)) from self._error
            self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` before the next step; its result or its error is in the future.

        Raises:
            EngineError: the engine is closed or broken.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(job)
        return future

    def end(self, error: EngineError) -> None:
        """Refuse later jobs with `error`, run those handed in before, and end. The first reason counts."""
        with self._lock:
            if self._error is None:
                self._error = error
                self._jobs.put(None)

    def stop(self) -> None:
        """End, and wait for it. Safe to call twice; not for the thread itself."""
        self.end(EngineError(f"the {self._name} engine is closed"))
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=not self._has_work())
            except Empty:
                self._try_step()
                continue
            if job is None:
                break
            try:
                job()
            except Exception as error:
                self.end(self._broke("between two steps", error))
        assert self._error is not None
        self._ended(self._error)

    def _try_step(self) -> None:
        try:
            self._step()
        except Exception as error:
            self.end(self._broke("while sampling", error))

    def _broke(self, when: str, error: Exception) -> EngineError:
        failure = EngineError(f"the {self._name} engine broke {when} ({error}); start a new one")
        failure.__cause__ = error
        return failure


def settle(future: Future[T], result: T) -> None:
    """Hand a result out, unless its caller was cancelled meanwhile."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def settle_error(future: Future[T], error: BaseException) -> None:
    """Hand an error out, unless its caller was cancelled meanwhile."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
