"""Evaluate a model folder on held-out tasks: success, pass@k and pass^k, with the trajectories beside the figures."""

from __future__ import annotations

import asyncio
from pathlib import Path

from data.ledger import Ledger
from rollouts.evaluate import Evaluation, summarise_groups
from rollouts.record import Record
from rollouts.tally import Tally
from rollouts.types import TrajectoryGroup
from scripts.console import run_main
from scripts.open_env import open_env
from scripts.open_rollouts import open_runner, roll_out
from scripts.output_file import check_output
from scripts.settings import EvalSettings, load_settings, resolved
from train.report.evaluations import EvaluationFile, write_evaluation


async def run_eval(settings: EvalSettings) -> Evaluation:
    """Attempt the tasks, write `output` (JSON) and the trajectories (`output` with .trajectories.jsonl), each as it
    ends: where nothing could be graded, they say why.

    Raises:
        ValueError: the files cannot be written, which is found out first.
    """
    output = Path(settings.output)
    check_output(output)
    # The tasks are the same whatever the seed of the run, so that runs can be compared.
    tasks = open_env(settings.rollout.env).tasks(settings.evaluation.split, settings.evaluation.num_tasks, 0)
    ended: dict[str, TrajectoryGroup] = {}
    ledger = Ledger()
    async with open_runner(settings.rollout, model=settings.model, seed=settings.seed, ledger=ledger) as runner:
        with Record(output.with_suffix(".trajectories.jsonl"), resolved(settings), anew=True) as record:
            await roll_out(
                runner,
                [(task, range(settings.attempts)) for task in tasks],
                prefix=settings.name,
                schedule=settings.rollout.schedule,
                tally=Tally(),
                on_done=record.append,
                on_group=lambda group: ended.update({group.task.task_id: group}),
            )
    groups = [ended[task.task_id] for task in tasks]
    result = summarise_groups(groups, attempts=settings.attempts)
    file = EvaluationFile(
        name=settings.name,
        model=settings.model,
        split=settings.evaluation.split,
        temperature=settings.rollout.sampling.temperature,
        evaluation=result,
    )
    write_evaluation(output, file)
    return result


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
    print(f"{settings.name}: {result_line(asyncio.run(run_eval(settings)))}")


if __name__ == "__main__":
    run_main(main)
