"""How good is the policy while it is trained, on tasks that it is not trained on?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from envs.types import Task
from rollouts.config import ScheduleConfig
from rollouts.engine import RecordingEngine
from rollouts.evaluate import Evaluation, summarise_groups
from rollouts.runner import Runner
from rollouts.scheduler import sample_groups


async def evaluate_held_out(
    runner: Runner, tasks: Sequence[Task], *, step: int, attempts: int, schedule: ScheduleConfig
) -> Evaluation:
    """Attempt the tasks with the weights after `step`. What is sampled is no part of the ledger: it is never trained.

    Raises:
        ValueError: no attempt could be graded.
        OutageError: nothing ends but by failures of our machinery.
    """
    engine = runner.engine
    if isinstance(engine, RecordingEngine):
        runner = replace(runner, engine=engine.unrecorded)
    prefix = f"eval-{step}"
    groups = await sample_groups(runner, tasks, num_generations=attempts, prefix=prefix, schedule=schedule)
    return summarise_groups(groups, attempts=attempts)


def metrics_of(result: Evaluation) -> dict[str, float]:
    """The row of a step's metrics that an evaluation gives."""
    row = {"eval/success": result.success, "eval/success_stderr": result.success_stderr}
    row |= {f"eval/pass@{k}": value for k, value in result.pass_at_k.items() if k > 1}
    row |= {f"eval/pass^{k}": value for k, value in result.pass_hat_k.items() if k > 1}
    names = ("reward/mean", "length/mean", "turns/mean", "trajectories/failed")
    return row | {f"eval/{name}": result.summary[name] for name in names}
