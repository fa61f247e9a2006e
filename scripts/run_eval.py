"""Evaluate a model folder on held-out tasks: success, pass@k and pass^k, with the trajectories beside the figures."""

from __future__ import annotations

import asyncio
from pathlib import Path

from data.ledger import Ledger
from rollouts.evaluate import Evaluation, evaluate
from rollouts.record import write_trajectories
from scripts.console import progress, run_main
from scripts.open_rollouts import open_runner
from scripts.settings import EvalSettings, load_settings
from train.report.evaluations import EvaluationFile, write_evaluation


async def run_eval(settings: EvalSettings) -> Evaluation:
    """Attempt the tasks, write `output` (JSON) and the trajectories (`output` with .trajectories.jsonl)."""
    async with open_runner(settings.rollout, model=settings.model, seed=settings.seed, ledger=Ledger()) as runner:
        # Held-out tasks are the same whatever the seed of the run, so that runs can be compared.
        tasks = runner.env.tasks(settings.evaluation.split, settings.evaluation.num_tasks, 0)
        with progress() as bar:
            place = bar.add_task("attempts", total=len(tasks) * settings.attempts, note="")
            result, trajectories = await evaluate(
                runner,
                tasks,
                attempts=settings.attempts,
                name=settings.name,
                max_concurrent=settings.rollout.engine.max_concurrent,
                on_done=lambda _: bar.advance(place),
            )
    output = Path(settings.output)
    write_trajectories(output.with_suffix(".trajectories.jsonl"), trajectories)
    write_evaluation(
        output,
        EvaluationFile(
            name=settings.name,
            model=settings.model,
            split=settings.evaluation.split,
            temperature=settings.rollout.sampling.temperature,
            evaluation=result,
        ),
    )
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
