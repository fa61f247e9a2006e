"""What all commands share: one-line errors, and progress that reads well on a terminal and in a log."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data.gate import GateError
from data.jsonl import torn_bytes
from envs.sandbox.base import SandboxError
from rollouts.engine import EngineError
from rollouts.outage import OutageError

# An OSError is a full disk, a missing file, a folder where a file should be.
EXPECTED = (ValueError, OSError, SandboxError, EngineError, OutageError, GateError)
T = TypeVar("T")
_ONE_MOMENT_S = 1.0
_FILE_WORDS: dict[type[OSError], str] = {
    FileNotFoundError: "no such file or folder",
    IsADirectoryError: "this is a folder; name a file",
    FileExistsError: "this is a file, where a folder should be",
    NotADirectoryError: "a part of this path is a file, where a folder should be",
    PermissionError: "permission denied",
}
CONTINUES = "start the same command again to continue"


def run_main(main: Callable[[], None], *, again: str = "started again, the same command begins from the start") -> None:
    """Run a command. SIGTERM ends it as Ctrl-C does: sandboxes are removed first.

    What a person can do something about is one line and exit code 2; a violated gate is exit code 1; anything else is a
    fault of ours and keeps its traceback. AGENTGRAD_DEBUG=1 keeps every traceback.

    Args:
        again: what is said after Ctrl-C about a second start.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A script's shell starts its background jobs like this; then SIGTERM would do nothing at all.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would tear up this line
        print(f"interrupted; {again}", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(130)
    except BaseExceptionGroup as group:
        expected, other = group.split(EXPECTED)
        if expected is None or other is not None or os.environ.get("AGENTGRAD_DEBUG"):
            raise
        _exit_with(_first(expected))
    except EXPECTED as error:
        if os.environ.get("AGENTGRAD_DEBUG"):
            raise
        _exit_with(error)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in which the Ctrl-C of one moment are one: the first cancels `main`, and a second one would break
    into its cleaning up. One that comes later ends a command that hangs.
    """

    async def with_one_interrupt() -> T:
        interrupt, last = signal.getsignal(signal.SIGINT), -math.inf

        def take(number: int, frame: FrameType | None) -> None:
            nonlocal last
            now = time.monotonic()
            if callable(interrupt) and now - last > _ONE_MOMENT_S:
                last = now
                interrupt(number, frame)

        if callable(interrupt):  # asyncio's own
            signal.signal(signal.SIGINT, take)
        return await main

    before = signal.getsignal(signal.SIGINT)
    try:
        return asyncio.run(with_one_interrupt())
    finally:
        signal.signal(signal.SIGINT, before)


def progress() -> Progress:
    """A progress bar on stderr; without a terminal nothing is drawn, and the lines of result tell the story."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    )


def error_text(error: BaseException) -> str:
    """An error in one line; what the system says of a file begins with its path, as our own messages do.

    >>> error_text(FileNotFoundError(2, "No such file or directory", "nope.jsonl"))
    'nope.jsonl: no such file or folder'
    """
    text = str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes | os.PathLike):
        # A move that failed has two paths, the second of which is the one that a person named.
        name = os.fsdecode(error.filename if error.filename2 is None else error.filename2)
        text = f"{name}: {_FILE_WORDS.get(type(error), error.strerror)}"
    return " ".join(text.split())


def say_torn(path: Path) -> None:
    """Say on stderr that the last line of a file is cut off, where it is: readers leave it out."""
    if torn := torn_bytes(path):
        print(f"{path}: the last line is cut off ({torn} bytes of it are there); it is left out", file=sys.stderr)


def _exit_with(error: BaseException) -> None:
    text = error_text(error)
    # What the system says alone does not always tell what went wrong; a time-out says nothing at all.
    kind = f"{type(error).__name__}: " if isinstance(error, TimeoutError | ConnectionError) else ""
    print(f"error: {kind}{text}", file=sys.stderr)
    sys.exit(1 if isinstance(error, GateError) else 2)


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
