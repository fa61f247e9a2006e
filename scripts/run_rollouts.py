"""Rollouts alone: attempt tasks and write the trajectories, one JSON line each."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollouts.record import write_trajectories
from rollouts.summary import summarise
from scripts.console import run_main
from scripts.open_rollouts import attempt_tasks
from scripts.settings import RolloutSettings, load_settings


async def run_rollouts(settings: RolloutSettings) -> str:
    """Write the file; returns the line of result."""
    trajectories = [trajectory for group in await attempt_tasks(settings) for trajectory in group.trajectories]
    write_trajectories(Path(settings.output), trajectories)
    row = summarise(trajectories)
    return (
        f"{len(trajectories)} trajectories in {settings.output}; reward {row['reward/mean']:.2f}, "
        f"{row['length/mean']:.0f} sampled tokens and {row['turns/mean']:.1f} turns each, "
        f"{row['trajectories/failed']:.0f} lost to infrastructure"
    )


def main() -> None:
    settings = load_settings(RolloutSettings)
    print(f"rollouts: {asyncio.run(run_rollouts(settings))}")


if __name__ == "__main__":
    run_main(main)
