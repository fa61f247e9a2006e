"""Rollouts alone: attempt tasks and append each trajectory to a file when it ends.

Started again with the same settings, it does what is missing: trajectories that are in the file are not sampled again,
those that were lost to infrastructure are.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.ledger import Ledger
from envs.types import Task
from rollouts.engine import Engine
from rollouts.outage import OutageError
from rollouts.record import Record
from rollouts.server_check import differing, score_probe
from rollouts.server_folder import weights_digest
from rollouts.tally import Tally
from rollouts.types import Trajectory
from scripts.console import CONTINUES, run_async, run_main
from scripts.open_env import open_env
from scripts.open_rollouts import open_runner, roll_out
from scripts.settings import RolloutSettings, first_difference, load_settings, resolved

_SERVED = "served_scores"
"""In the header: the logprobs (nats) that the servers gave to the probe of `server_check`."""


async def run_rollouts(settings: RolloutSettings) -> str:
    """Write what is missing in the file; returns the line of result.

    Raises:
        ValueError: the file holds trajectories that were sampled with other settings.
        OutageError: no trajectory could be graded.
    """
    # The tasks are the same whatever the seed of the run, so that runs can be compared.
    tasks = open_env(settings.rollout.env).tasks(settings.evaluation.split, settings.evaluation.num_tasks, 0)
    total = len(tasks) * settings.attempts
    with Record(Path(settings.output), recorded_settings(settings)) as record:
        check_settings(record, settings)
        tally, missing = take_stock(record, tasks, settings)
        if missing:
            try:
                await _sample(settings, record, tally, missing)
            except BaseException as end:
                again = "" if isinstance(end, asyncio.CancelledError | KeyboardInterrupt) else f"; {CONTINUES}"
                print(f"{tally.graded} of {total} trajectories are in {settings.output}{again}", file=sys.stderr)
                raise
    if not tally.graded:
        raise OutageError(f"none of the {total} trajectories could be graded: {tally.first_cause}")
    again = "; start the same command again to attempt those once more" if tally.lost else ""
    first = f"{tally.trajectories} trajectories in {settings.output}; {tally.line()}{again}"
    return "\n  ".join([first, *tally.details()])


def check_settings(record: Record, settings: RolloutSettings) -> None:
    """Can the file be gone on with? Every header of it is asked: files may have been put one behind the other.

    Raises:
        ValueError: it holds trajectories that were sampled with other settings, or another command wrote it.
    """
    wanted = recorded_settings(settings)
    for recorded in (record.settings, *record.later_settings):
        if "weights" not in recorded:
            raise ValueError(
                f"{settings.output} was written by another command (run_eval writes such files), and is not gone on "
                "with here; choose another output"
            )
        before = {name: value for name, value in recorded.items() if name != _SERVED}
        difference = first_difference(before, wanted)
        if difference:
            raise ValueError(
                f"{settings.output} holds trajectories of another configuration ({difference}); delete the file or "
                "choose another output"
            )


def take_stock(
    record: Record, tasks: Sequence[Task], settings: RolloutSettings
) -> tuple[Tally, list[tuple[Task, list[int]]]]:
    """What is in the file already, and which siblings of which tasks are missing. Trajectories that were lost to
    infrastructure are taken out: they are attempted again, after those that never were, lest tasks that are broken keep
    the others from their turn.

    Raises:
        ValueError: one is there twice.
    """
    tally, done, lost_tasks = Tally(), set[tuple[str, int]](), set[str]()

    def is_done(trajectory: Trajectory) -> bool:
        if trajectory.stop_reason.is_infrastructure:
            lost_tasks.add(trajectory.task_id)
            tally.add_begun_again(trajectory)
            return False
        sibling = (trajectory.task_id, trajectory.sibling_index)
        if sibling in done:
            raise ValueError(
                f"{record.path} holds attempt {sibling[1]} at task {sibling[0]} twice: files with the same attempts "
                "were put one behind the other; leave one of them out, or choose another output"
            )
        tally.add(trajectory)
        done.add(sibling)
        return True

    lost = record.keep(is_done)
    if record.torn_bytes:
        print(f"{record.path}: the last line was cut off in the middle ({record.torn_bytes} bytes); dropped")
    if done or lost:
        again = f", {lost} that were lost to infrastructure are attempted again" if lost else ""
        print(f"{record.path}: {len(done)} of {len(tasks) * settings.attempts} trajectories are there{again}")
    siblings = {
        task.task_id: [index for index in range(settings.attempts) if (task.task_id, index) not in done]
        for task in tasks
    }
    missing = [(task, siblings[task.task_id]) for task in tasks if siblings[task.task_id]]
    return tally, sorted(missing, key=lambda one: one[0].task_id in lost_tasks)


def recorded_settings(settings: RolloutSettings) -> dict[str, Any]:
    """What the header of the file says: where it lies does not matter, and which weights there were does."""
    values = resolved(settings)
    del values["output"]
    return values | {"weights": weights_digest(Path(settings.model))}


async def check_served_weights(settings: RolloutSettings, record: Record, engine: Engine) -> None:
    """Servers have weights of their own, whatever is in our folder: how they score a fixed text goes into the header of
    a new file, and must be the same when the file is gone on with.

    Raises:
        ValueError: the file holds trajectories of other weights.
    """
    if settings.rollout.engine.kind != "server":
        return
    scores = await score_probe(engine, Path(settings.model))
    if _SERVED not in record.settings:
        record.settings = {**record.settings, _SERVED: scores}
    served = [header[_SERVED] for header in (record.settings, *record.later_settings) if _SERVED in header]
    for difference in filter(None, (differing(one, scores) for one in served)):
        raise ValueError(
            f"{record.path} holds trajectories of other weights than {', '.join(settings.rollout.engine.servers)} "
            f"serves now (logprobs differ by {difference:.2g} nats in the mean); serve the first ones again, or choose "
            "another output"
        )


async def _sample(
    settings: RolloutSettings, record: Record, tally: Tally, missing: Sequence[tuple[Task, Sequence[int]]]
) -> None:
    ledger = Ledger()

    def on_done(trajectory: Trajectory) -> None:
        record.append(trajectory)
        ledger.forget()  # nothing is trained on here, and thousands of trajectories would fill the memory

    async with open_runner(settings.rollout, model=settings.model, seed=settings.seed, ledger=ledger) as runner:
        await check_served_weights(settings, record, runner.engine)
        await roll_out(
            runner,
            missing,
            prefix=settings.name,
            schedule=settings.rollout.schedule,
            tally=tally,
            on_done=on_done,
        )


def main() -> None:
    settings = load_settings(RolloutSettings)
    print(f"rollouts: {run_async(run_rollouts(settings))}")


if __name__ == "__main__":
    run_main(main, again=CONTINUES)
