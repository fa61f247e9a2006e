"""Rollouts alone: attempt tasks and write the trajectories, one JSON line each."""

from __future__ import annotations

import asyncio
from pathlib import Path

from data.ledger import Ledger
from rollouts.group import sample_groups
from rollouts.record import write_trajectories
from rollouts.summary import summarise
from scripts.console import progress, run_main
from scripts.open_rollouts import open_runner
from scripts.settings import RolloutSettings, load_settings


async def run_rollouts(settings: RolloutSettings) -> str:
    """Write the file; returns the line of result."""
    async with open_runner(settings.rollout, model=settings.model, seed=settings.seed, ledger=Ledger()) as runner:
        tasks = runner.env.tasks(settings.evaluation.split, settings.evaluation.num_tasks, 0)
        with progress() as bar:
            place = bar.add_task("trajectories", total=len(tasks) * settings.attempts, note="")
            groups = await sample_groups(
                runner,
                tasks,
                num_generations=settings.attempts,
                prefix=settings.name,
                max_concurrent=settings.rollout.engine.max_concurrent,
                on_done=lambda _: bar.advance(place),
            )
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
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
