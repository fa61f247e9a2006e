"""What a person sees while trajectories are sampled: a live line on a terminal, a line every so often in a log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from rich.progress import Progress, TaskID

from rollouts.scheduler import ScheduleStatus
from rollouts.tally import Tally
from scripts.console import progress

_TERMINAL_S, _LOG_S = 1.0, 30.0
_RATE_OVER = 10
"""Looks over which tokens per second are counted: ten seconds on a terminal, five minutes in a log."""


def status_line(status: ScheduleStatus, tally: Tally, tokens_per_s: float) -> str:
    """Where a run stands.

    >>> from rollouts.engine import EngineLoad
    >>> load = EngineLoad(running=3, waiting=1, capacity=4)
    >>> status = ScheduleStatus(queued=7, in_flight=6, sampling=4, retried=0, sampled_tokens=0, load=load)
    >>> status_line(status, Tally(), 90.4)
    '6 in flight (4 sample, 2 in tools or starting), 7 queued, 90 tokens/s, 0 % tool time, engine 3 + 1 waiting, 0 lost'
    """
    digits = 4 if tally.cost_usd < 10 else 2
    cost = f", ${tally.cost_usd:,.{digits}f}" if tally.cost_usd else ""
    again = f", {status.retried} again" if status.retried else ""
    return (
        f"{status.in_flight} in flight ({status.sampling} sample, "
        f"{status.in_flight - status.sampling} in tools or starting), {status.queued} queued, "
        f"{tokens_per_s:,.0f} tokens/s, {100 * tally.tool_share:.0f} % tool time, "
        f"engine {status.load.running} + {status.load.waiting} waiting, {tally.lost} lost{again}{cost}"
    )


@asynccontextmanager
async def show_rollouts(total: int, tally: Tally, status: Callable[[], ScheduleStatus]) -> AsyncIterator[None]:
    """Show how far `tally` is on the way to `total` trajectories, on stderr, while the body runs."""
    with progress() as bar:
        place = bar.add_task("trajectories", total=total, completed=tally.trajectories, note="")
        async with keep_current(bar, place, total, tally, status):
            yield


@asynccontextmanager
async def keep_current(
    bar: Progress, place: TaskID, total: int, tally: Tally, status: Callable[[], ScheduleStatus]
) -> AsyncIterator[None]:
    """`show_rollouts` at a place of a bar that is there already."""
    is_terminal = bar.console.is_terminal
    looks: deque[tuple[float, int]] = deque([(asyncio.get_running_loop().time(), 0)], maxlen=_RATE_OVER + 1)

    async def look() -> None:
        while True:
            await asyncio.sleep(_TERMINAL_S if is_terminal else _LOG_S)
            now = status()
            looks.append((asyncio.get_running_loop().time(), now.sampled_tokens))
            (then, before), (here, tokens) = looks[0], looks[-1]
            note = status_line(now, tally, (tokens - before) / max(here - then, 1e-9))
            bar.update(place, completed=tally.trajectories, note=note)
            if not is_terminal:
                line = f"{tally.trajectories}/{total} trajectories: {note}"
                bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        bar.update(place, completed=tally.trajectories, note="")
