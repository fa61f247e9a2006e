"""Calls of tools: checked, run by their deadline, tried again where that may help, and turned into observations.

A tool that fails never raises out of here; only the sandbox does. What the text of a result looks like is in
`observations.py`.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from data.tool_formats.base import CallError
from envs.base import Session, TransientToolError
from envs.sandbox.base import SandboxError
from envs.tools import call_error
from envs.types import ToolCall, ToolResult, ToolSpec
from rollouts.observations import clean, observe

T = TypeVar("T")

_LARGE = 100_000
"""Characters."""
_SHOWN = 200
"""Characters of an exception's message that the model reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTerms:
    """What holds for every call of a run.

    timeout_s: the deadline of one try, where the tool's spec has none of its own.
    retries: how often a call is made again after a `TransientToolError`.
    backoff_s: the wait before the first retry; twice as long before each further one.
    observe: a result of any type → the text that the model reads.
    """

    tools: Sequence[ToolSpec]
    timeout_s: float
    retries: int = 2
    backoff_s: float = 0.2
    observe: Callable[[object], str] = observe


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """What came of one call.

    invalid: the call was wrong, and no tool ran.
    failure: what went wrong inside the tool, with the traceback of its code, for a person; the model gets one line.
    late: the tool gave no result in time.
    loop_held_s: the longest time that the tool held the thread which all trajectories share.
    """

    result: ToolResult
    invalid: bool = False
    failure: str | None = None
    late: bool = False
    retries: int = 0
    loop_held_s: float = 0.0


async def call_tools(
    session: Session, calls: Sequence[ToolCall | CallError], terms: ToolTerms
) -> Sequence[CallOutcome]:
    """Run the calls of one turn, all at once; the outcomes are in their order.

    Raises:
        SandboxError: the sandbox failed one of them; the others have been cancelled and are gone.
    """
    if len(calls) == 1:
        return [await _call(session, calls[0], terms)]
    # A TaskGroup would leave this task cancelled, as it were, when one of them fails (up to Python 3.12).
    running = [asyncio.create_task(_call(session, call, terms)) for call in calls]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        while not all(task.done() for task in running):
            with suppress(asyncio.CancelledError):  # again: whoever asks `is_cancelled` sees it
                await asyncio.wait(running)


async def _call(session: Session, call: ToolCall | CallError, terms: ToolTerms) -> CallOutcome:
    if isinstance(call, CallError):
        return CallOutcome(result=_told(call, terms.observe(call.text)), invalid=True)
    return await call_tool(session, call, terms)


async def call_tool(session: Session, call: ToolCall, terms: ToolTerms) -> CallOutcome:
    """Run one call. A wrong call, a deadline that passed and a tool that failed each become an observation of one line.

    Raises:
        SandboxError: the sandbox failed.
    """
    wrong = call_error(call, terms.tools)
    if wrong is not None:
        return CallOutcome(result=_told(call, terms.observe(wrong)), invalid=True)
    timeout_s = next((tool.timeout_s for tool in terms.tools if tool.name == call.name), None) or terms.timeout_s
    held = _Held()
    started = time.perf_counter()
    tries = 0
    failure = None
    while True:
        tries += 1
        try:
            result = await _try(session, call, timeout_s, held, terms.observe)
        except TransientToolError as error:
            if tries <= terms.retries:
                await asyncio.sleep(terms.backoff_s * 2 ** (tries - 1))
                continue
            how_often = f" {tries} times" if tries > 1 else ""
            result, failure = _failed(call, error, terms.observe, how_often), traceback.format_exc()
        except SandboxError:
            raise
        except BaseException as error:
            pass_on_interruption(error)
            result, failure = _failed(call, error, terms.observe), traceback.format_exc()
        break
    late = result is None
    if result is None:
        result = _told(call, terms.observe(f"error: {call.name} gave no result within {timeout_s:g} s"))
    return CallOutcome(
        result=replace(result, duration_s=time.perf_counter() - started),
        failure=None if failure is None else clean(failure),
        late=late,
        retries=tries - 1,
        loop_held_s=held.longest_s,
    )


async def _try(
    session: Session, call: ToolCall, timeout_s: float, held: _Held, observe: Callable[[object], str]
) -> ToolResult | None:
    """One try, its content as text; None where the deadline passed, which is kept as long as the tool does not block
    the thread."""
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            returned = await held.watch(_checked(session, session.call(call), Coroutine, "be an async function"))
    except BaseException as error:
        pass_on_interruption(error)
        if not clock.expired():  # the tool's own: a failure like any other
            raise
        return None  # whatever it made of its deadline
    if clock.expired():  # the tool swallowed it, and gave a result after all
        return None
    result = _checked(session, returned, ToolResult, "return a ToolResult")
    # Whatever the tool calls it, the answer is to this call.
    content: object = result.content
    # Megabytes take a second to clean and to cut: beside the loop, so that no other trajectory waits for it.
    text = await asyncio.to_thread(observe, content) if _is_large(content) else observe(content)
    return replace(result, call_id=call.call_id, content=text)


def _checked(session: Session, value: object, kind: type[T], must: str) -> T:
    """What a session gave, which no type checker has to have seen.

    Raises:
        TypeError: it is of another type; the message says what a session must do.
    """
    if isinstance(value, kind):
        return value
    given = "None" if value is None else f"a value of type {type(value).__name__}"
    raise TypeError(f"{type(session).__name__}.call gave {given}; a session's call must {must}")


def _is_large(content: object) -> bool:
    return not isinstance(content, str) or len(content) > _LARGE


def _failed(call: ToolCall, error: BaseException, observe: Callable[[object], str], how_often: str = "") -> ToolResult:
    """The type and the message, in one line; of our own code the model learns nothing."""
    try:
        message = " ".join(clean(str(error)).split())
    except Exception:  # an exception whose own text fails
        message = ""
    message = message if len(message) <= _SHOWN else message[:_SHOWN] + "…"
    if isinstance(error, SystemExit):
        message = "it asked the process to exit"
    said = type(error).__name__ + (f": {message}" if message else "")
    return _told(call, observe(f"error: {call.name} failed{how_often}: {said}"), failed=True)


def _told(call: ToolCall | CallError, text: str, *, failed: bool = False) -> ToolResult:
    return ToolResult(call_id=call.call_id, content=text, is_error=True, failed=failed)


class _Held:
    """Measures how long a tool holds the event loop: the longest time between two of its awaits."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def watch(self, work: Coroutine[Any, Any, ToolResult]) -> _Watched:
        return _Watched(work, self)


class _Watched:
    """An awaitable that goes on as `work` does, step by step, and takes the time of each step."""

    def __init__(self, work: Coroutine[Any, Any, ToolResult], held: _Held) -> None:
        self._work = work
        self._held = held

    def __await__(self) -> Generator[Any, Any, ToolResult]:
        value, error = None, None
        while True:
            started = time.perf_counter()
            try:
                waited_for = self._work.send(value) if error is None else self._work.throw(error)
            except StopIteration as done:
                return done.value
            finally:
                self._held.longest_s = max(self._held.longest_s, time.perf_counter() - started)
            try:
                value, error = (yield waited_for), None
            except BaseException as interruption:  # the deadline, or a cancellation: the tool must see it
                error = interruption


def pass_on_interruption(error: BaseException) -> None:
    """See that what is meant for the whole run does not end as the failure of what ran when it came. A tool may raise
    anything, `SystemExit` and `GeneratorExit` too, and so may a sandbox that is told to stop.

    Raises:
        KeyboardInterrupt: `error` is one.
        CancelledError: somebody cancelled this task, however what ran answered that.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    if is_cancelled():
        if isinstance(error, asyncio.CancelledError):
            raise error
        raise asyncio.CancelledError from error


def is_cancelled() -> bool:
    """Whether somebody cancelled this task; else a `CancelledError` is a tool's own, of a task that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
