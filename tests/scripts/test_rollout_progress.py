"""What is said while trajectories are sampled: in a log, a line every half minute."""

from __future__ import annotations

import asyncio

import pytest

from rollouts.engine import EngineLoad
from rollouts.scheduler import ScheduleStatus
from rollouts.tally import Tally
from scripts.rollout_progress import show_rollouts
from tests.rollouts.virtual_clock import run_virtual


def test_a_log_is_never_silent_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens per second are of the last five minutes: 600 in half a minute, then none."""
    tally, tokens = Tally(trajectories=2, lost=1, env_s=3.0, generate_s=9.0, cost_usd=0.05), 0

    def status() -> ScheduleStatus:
        load = EngineLoad(running=3, waiting=1, capacity=4)
        return ScheduleStatus(queued=7, in_flight=6, sampling=4, retried=1, sampled_tokens=tokens, load=load)

    async def run() -> None:
        nonlocal tokens
        async with show_rollouts(16, tally, status):
            tokens = 600
            await asyncio.sleep(100)

    run_virtual(run())
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 3
    assert lines[0] == (
        "2/16 trajectories: 6 in flight (4 sample, 2 in tools or starting), 7 queued, 20 tokens/s, 25 % tool "
        "time, engine 3 + 1 waiting, 1 lost, 1 again, $0.0500"
    )
    assert ", 7 tokens/s, " in lines[2]


def test_a_body_that_fails_ends_the_lines() -> None:
    async def run() -> None:
        load = EngineLoad(running=0, waiting=0, capacity=1)
        status = ScheduleStatus(queued=0, in_flight=0, sampling=0, retried=0, sampled_tokens=0, load=load)
        with pytest.raises(OSError, match="full"):
            async with show_rollouts(1, Tally(), lambda: status):
                raise OSError("full")

    run_virtual(run())
