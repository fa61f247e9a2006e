"""Evaluate a model folder on held-out tasks: success, pass@k and pass^k, with the trajectories beside the figures."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollouts.evaluate import Evaluation, summarise_groups
from rollouts.record import write_trajectories
from scripts.console import run_main
from scripts.open_rollouts import attempt_tasks
from scripts.settings import EvalSettings, load_settings
from train.report.evaluations import EvaluationFile, write_evaluation


async def run_eval(settings: EvalSettings) -> Evaluation:
    """Attempt the tasks, write `output` (JSON) and the trajectories (`output` with .trajectories.jsonl)."""
    groups = await attempt_tasks(settings)
    output = Path(settings.output)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    # First of all: where nothing could be graded, they say why.
    write_trajectories(output.with_suffix(".trajectories.jsonl"), trajectories)
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
