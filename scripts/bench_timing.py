"""How are sandboxes timed? Command latency, starts one by one, and many at once, the same way for each contender.

A contender is a function that starts something which runs commands; nothing here knows whose it is.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Run = Callable[[Sequence[str]], Awaitable[str]]
"""argv → stdout. Raises when the command could not be run or its exit code is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Something that runs commands until it is stopped."""

    run: Run
    stop: Callable[[], Awaitable[None]]


Start = Callable[[], Awaitable[Started]]


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Percentiles by linear interpolation between the two nearest values.

    >>> summary([0.001, 0.002, 0.003])
    {'p50_ms': 2.0, 'p95_ms': 2.9, 'n': 3}
    """
    return {"p50_ms": _percentile(seconds, 50), "p95_ms": _percentile(seconds, 95), "n": len(seconds)}


def _percentile(seconds: Sequence[float], percent: int) -> float:
    if len(seconds) == 1:
        return round(1000 * seconds[0], 3)
    return round(1000 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1], 3)


def show(what: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one line for each contender."""
    for name, row in rows.items():
        figures = "  ".join(f"{key} {value:,}" if value is not None else f"{key} -" for key, value in row.items())
        print(f"{what:<14} {name:<21} {figures}", flush=True)


async def command_latency(
    contenders: Mapping[str, Run], argv: Sequence[str], expected: str, count: int
) -> dict[str, dict[str, Any]]:
    """Latency of one command, `count` times each. They take turns, so that a slow moment of the machine hits all.

    The order is another one each time, since what one leaves the machine to do hits the next.
    `wrong` counts the answers other than `expected`; a first, uncounted round warms everything up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    wrong = dict.fromkeys(contenders, 0)
    chance = random.Random(0)
    for turn in range(count + 1):
        for name in chance.sample(list(contenders), len(contenders)):
            begin = time.perf_counter()
            output = await contenders[name](argv)
            duration = time.perf_counter() - begin
            # A session in a terminal does not say whether its last line was ended.
            wrong[name] += output.rstrip("\n") != expected
            if turn:
                seconds[name].append(duration)
    return {name: summary(seconds[name]) | {"wrong": wrong[name]} for name in contenders}


async def start_latency(
    contenders: Mapping[str, Start], count: int, before_each: Callable[[], Awaitable[None]]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Latency of starts and of stops, `count` times each, in turns; `before_each` makes everything ready.

    What was started has to run a command before it is stopped; that is not part of the time.
    """
    starts: dict[str, list[float]] = {name: [] for name in contenders}
    stops: dict[str, list[float]] = {name: [] for name in contenders}
    chance = random.Random(0)
    for _ in range(count):
        for name in chance.sample(list(contenders), len(contenders)):
            await before_each()
            begin = time.perf_counter()
            started = await contenders[name]()
            starts[name].append(time.perf_counter() - begin)
            try:
                await started.run(["true"])
            finally:
                begin = time.perf_counter()
                await started.stop()
                stops[name].append(time.perf_counter() - begin)
    return (
        {name: summary(values) for name, values in starts.items()},
        {name: summary(values) for name, values in stops.items()},
    )


async def many_at_once(start: Start, count: int, commands_each: int) -> dict[str, Any]:
    """Start `count` at the same time, let all run commands at the same time, stop all at the same time.

    `right` counts those of which every answer was right; each command asks for another one.
    """
    begin = time.perf_counter()
    outcomes = await asyncio.gather(*(start() for _ in range(count)), return_exceptions=True)
    start_s = time.perf_counter() - begin
    all_started = [outcome for outcome in outcomes if isinstance(outcome, Started)]
    try:
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise errors[0]
        begin = time.perf_counter()
        done = await asyncio.gather(
            *(_work(started, number, commands_each) for number, started in enumerate(all_started))
        )
        work_s = time.perf_counter() - begin
    finally:
        begin = time.perf_counter()
        await asyncio.gather(*(started.stop() for started in all_started))
        stop_s = time.perf_counter() - begin
    seconds = [duration for durations, _ in done for duration in durations]
    return {
        "sandboxes": count,
        "starts_per_s": round(count / start_s, 2),
        "commands": len(seconds),
        "commands_per_s": round(len(seconds) / work_s, 1),
        "command_p95_ms": _percentile(seconds, 95),
        "right": sum(right for _, right in done),
        "stops_per_s": round(count / stop_s, 2),
    }


async def _work(started: Started, number: int, commands: int) -> tuple[list[float], bool]:
    seconds: list[float] = []
    right = True
    for command in range(commands):
        begin = time.perf_counter()
        output = await started.run(["sh", "-c", 'echo "$(($1 * 1000 + $2))"', "sh", str(number), str(command)])
        seconds.append(time.perf_counter() - begin)
        right &= output == f"{number * 1000 + command}\n"
    return seconds, right
