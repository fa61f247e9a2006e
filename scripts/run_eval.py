"""Evaluate a model folder on held-out tasks: success, pass@k and pass^k, with the trajectories beside the figures.

Started again, it evaluates anew. The files of an earlier evaluation are there until the new ones take their place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data.ledger import Ledger
from envs.types import Task
from rollouts.evaluate import Evaluation, summarise_groups
from rollouts.record import Record
from rollouts.runner import Runner
from rollouts.tally import Tally
from rollouts.types import TrajectoryGroup
from scripts.console import run_async, run_main
from scripts.open_env import open_env
from scripts.open_rollouts import open_runner, roll_out
from scripts.output_file import check_output
from scripts.settings import EvalSettings, load_settings, resolved
from train.report.evaluations import EvaluationFile, write_evaluation


async def run_eval(settings: EvalSettings) -> Evaluation:
    """Attempt the tasks, write `output` (JSON) and the trajectories (`output` with .trajectories.jsonl). Until both can
    be, the trajectories are in a file .unfinished.jsonl, each as it ends: where nothing could be graded, they say why.

    Raises:
        ValueError: the files cannot be written, which is found out first.
    """
    output = Path(settings.output)
    check_output(output)
    finished, unfinished = output.with_suffix(".trajectories.jsonl"), output.with_suffix(".unfinished.jsonl")
    # The tasks are the same whatever the seed of the run, so that runs can be compared.
    tasks = open_env(settings.rollout.env).tasks(settings.evaluation.split, settings.evaluation.num_tasks, 0)
    ledger = Ledger()
    async with open_runner(settings.rollout, model=settings.model, seed=settings.seed, ledger=ledger) as runner:
        groups = await _sample(settings, runner, tasks, unfinished)
    result = summarise_groups(groups, attempts=settings.attempts)
    file = EvaluationFile(
        name=settings.name,
        model=settings.model,
        split=settings.evaluation.split,
        temperature=settings.rollout.sampling.temperature,
        evaluation=result,
    )
    write_evaluation(output, file)
    unfinished.replace(finished)
    return result


async def _sample(settings: EvalSettings, runner: Runner, tasks: Sequence[Task], path: Path) -> list[TrajectoryGroup]:
    """The group of each task; each trajectory is in `path` when it ends."""
    ended, tally = dict[str, TrajectoryGroup](), Tally()
    with Record(path, resolved(settings), anew=True) as record:
        try:
            await roll_out(
                runner,
                [(task, range(settings.attempts)) for task in tasks],
                prefix=settings.name,
                schedule=settings.rollout.schedule,
                tally=tally,
                on_done=record.append,
                on_group=lambda group: ended.update({group.task.task_id: group}),
            )
        except BaseException:
            if tally.trajectories:
                total = len(tasks) * settings.attempts
                print(f"{tally.trajectories} of {total} trajectories are in {path}", file=sys.stderr)
            raise
    return [ended[task.task_id] for task in tasks]


def result_line(result: Evaluation) -> str:
    k = max(result.pass_at_k)
    failed = int(result.summary["trajectories/failed"])
    lost = f"; {failed} attempts lost to infrastructure" if failed else ""
    return (
        f"success {100 * result.success:.1f} ± {100 * result.success_stderr:.1f} %, "
        f"pass@{k} {100 * result.pass_at_k[k]:.1f} %, pass^{k} {100 * result.pass_hat_k[k]:.1f} % "
        f"({result.tasks} tasks × {result.attempts} attempts{lost})"
    )


def main() -> None:
    settings = load_settings(EvalSettings)
    print(f"{settings.name}: {result_line(run_async(run_eval(settings)))}")


if __name__ == "__main__":
    run_main(main)
