"""Train a model folder with GRPO. Started again with the same configuration, a run continues from its checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from data.ledger import Ledger
from envs.types import Task
from rollouts.runner import Runner
from rollouts.scheduler import ScheduleStatus
from rollouts.tally import Tally
from scripts.console import CONTINUES, progress, run_async, run_main
from scripts.dry_run import dry_run
from scripts.open_env import open_env
from scripts.open_rollouts import open_runner
from scripts.rollout_progress import keep_current
from scripts.run_folder import only_writer
from scripts.settings import GrpoSettings, load_settings, resolved, save_resolved
from train.checkpoint import latest_checkpoint, load_feed, load_state, save_final
from train.group_feed import FeedState
from train.grpo import GrpoRun, Sampling, check_sizes, leave_together
from train.learner import Learner
from train.lora import load_trained
from train.metrics import MetricsLog, start_wandb
from train.model import check_model_folder, load_tokenizer
from train.reference import load_reference
from train.replay import dumped_steps, replay


def main() -> None:
    settings = load_settings(GrpoSettings)
    tasks = open_env(settings.rollout.env).tasks("train", settings.grpo.num_tasks, settings.seed)
    check_sizes(settings.grpo, tasks, max_context_tokens=settings.rollout.engine.max_context_tokens)
    if settings.dry_run:
        check_model_folder(settings.model)
        run_async(dry_run(settings))
        return
    is_main = int(os.environ.get("RANK", "0")) == 0
    # The bars that transformers draws for each file it reads or writes would tear ours.
    disable_progress_bar()
    folder = Path(settings.output_dir)
    with only_writer(folder) if is_main else nullcontext():
        if is_main:
            save_resolved(settings, folder)
        if settings.replay is None:
            run_async(run_grpo(settings, is_main=is_main))
        else:
            run_replay(settings, Path(settings.replay), is_main=is_main)


def run_replay(settings: GrpoSettings, dump: Path, *, is_main: bool) -> None:
    """Train on the samples of another run, from the first one on."""
    folder = Path(settings.output_dir)
    dumped_steps(dump)
    accelerator = Accelerator()
    learner = _learner(settings, settings.model, accelerator)
    log = None
    if is_main:
        log = MetricsLog(folder, start_after=0, run=start_wandb(folder, settings.wandb, resolved(settings)))

    def on_step(row: Mapping[str, Any]) -> None:
        if is_main:
            line = f"loss {row['loss']:.4f}, entropy {row['entropy']:.2f}" if "loss" in row else "nothing to train on"
            print(
                f"replay {row['step']}: {row['tokens/trained']} tokens, {line}, {row['time/update_s']:.1f} s",
                flush=True,
            )

    steps = replay(dump, learner, settings.grpo, log=log, on_step=on_step)
    if log is not None:
        log.close()
        shutil.rmtree(folder / "final", ignore_errors=True)
        save_final(folder, model=learner.model, tokenizer=load_tokenizer(settings.model))
        print(f"replay: {steps} steps of {dump}; the weights are in {folder / 'final'}")
    leave_together(accelerator)


async def run_grpo(settings: GrpoSettings, *, is_main: bool) -> None:
    """Open everything, train, close everything."""
    folder = Path(settings.output_dir)
    found = latest_checkpoint(folder / "checkpoints")
    start_after = found[1] if found else 0
    # Adapters start from the base weights; without them a checkpoint's weights are the trainer's own.
    model_path = str(found[0]) if found and settings.lora.rank == 0 else settings.model
    if (folder / "final").exists():
        if is_main:
            print(f"grpo: {folder} has all its {start_after} steps; delete it to start over")
        return
    async with AsyncExitStack() as stack:
        sampling: Sampling | None = None
        runner: Runner | None = None
        path = folder / "ledger" / "completions.jsonl"
        feed_state = load_feed(found[0]) if found else FeedState()
        waiting = {one.group.group_id for one in feed_state.ready}
        ledger = Ledger(path, keep=feed_state.is_kept, remember=waiting) if is_main else Ledger()
        if is_main:
            # The engine starts first: it must not find the process group of the trainer.
            runner = await stack.enter_async_context(
                open_runner(
                    settings.rollout,
                    model=model_path,
                    seed=settings.seed,
                    ledger=ledger,
                    trains=True,
                    adapter_rank=settings.lora.rank if settings.lora.sync == "adapter" else 0,
                    can_sleep=settings.grpo.vllm_enable_sleep_mode,
                )
            )
        accelerator = Accelerator()
        learner = _learner(settings, model_path, accelerator)
        if found:
            learner.load_state(load_state(found[0]))
        log = None
        if runner is not None:
            sampling = Sampling(
                runner=runner,
                engine=runner.engine,
                ledger=ledger,
                probes=_probes(runner),
                schedule=settings.rollout.schedule,
                sleeps=settings.grpo.vllm_enable_sleep_mode,
                syncs_adapter=settings.lora.sync == "adapter",
                held_out=_held_out(settings),
            )
            wandb_run = start_wandb(folder, settings.wandb, resolved(settings))
            log = MetricsLog(folder, start_after=start_after, run=wandb_run)
            stack.callback(log.close)
            stack.callback(ledger.close)
            if start_after:
                print(f"grpo: continuing after step {start_after}")
        await _train(settings, folder, accelerator, learner, sampling, log, start_after, feed_state)
        leave_together(accelerator)


async def _train(
    settings: GrpoSettings,
    folder: Path,
    accelerator: Accelerator,
    learner: Learner,
    sampling: Sampling | None,
    log: MetricsLog | None,
    start_after: int,
    feed_state: FeedState,
) -> None:
    grpo = settings.grpo
    with progress() as bar:
        steps = bar.add_task("steps", total=grpo.max_steps, completed=start_after, note="")
        total = grpo.tasks_per_step * grpo.num_generations
        rollouts = bar.add_task("trajectories", total=total, note="")

        first_cause: str | None = None

        @asynccontextmanager
        async def while_sampling(tally: Tally, status: Callable[[], ScheduleStatus]) -> AsyncIterator[None]:
            nonlocal first_cause
            async with keep_current(bar, rollouts, total, tally, status):
                yield
            first_cause = tally.first_cause

        def on_step(row: Mapping[str, Any]) -> None:
            bar.reset(rollouts)
            bar.update(steps, completed=row["step"])
            line = step_line(row, grpo.max_steps) + (f"; the first failure: {first_cause}" if first_cause else "")
            bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

        def on_alarm(line: str) -> None:
            bar.console.print(f"alarm: {line}", highlight=False, markup=False, soft_wrap=True)

        run = GrpoRun(
            folder=folder,
            seed=settings.seed,
            config=grpo,
            checkpoints=settings.checkpoint,
            evaluation=settings.evaluation,
            tasks=open_env(settings.rollout.env).tasks("train", grpo.num_tasks, settings.seed),
            accelerator=accelerator,
            learner=learner,
            tokenizer=load_tokenizer(settings.model),
            sampling=sampling,
            log=log,
            while_sampling=while_sampling,
            on_step=on_step,
            on_alarm=on_alarm,
        )
        await run.train(start_after=start_after, feed_state=feed_state)


def step_line(row: Mapping[str, Any], max_steps: int) -> str:
    """One line for each step, for a log and for the terminal."""
    seconds = sum(value for name, value in row.items() if name.startswith("time/"))
    update = f"entropy {row['entropy']:.2f}, " if "entropy" in row else "no group with signal, no update, "
    evaluated = f", held-out success {100 * row['eval/success']:.1f} %" if "eval/success" in row else ""
    failed = f", {row['trajectories/failed']:.0f} failed" if row["trajectories/failed"] else ""
    forged = f", {row['control_tokens/forged']} forged control tokens" if row["control_tokens/forged"] else ""
    return (
        f"step {row['step']}/{max_steps}: reward {row['reward/mean']:.2f}, length {row['length/mean']:.0f}, {update}"
        f"{row['tokens/trained']} of {row['tokens/total']} tokens trained, "
        f"{100 * row['groups/dead']:.0f} % dead groups{failed}{forged}{evaluated}, {seconds:.1f} s"
    )


def _held_out(settings: GrpoSettings) -> list[Task]:
    """The same whatever the seed of the run, so that runs can be compared."""
    count = settings.evaluation.num_tasks if settings.evaluation.eval_steps else 0
    return open_env(settings.rollout.env).tasks("heldout", count, 0) if count else []


def _probes(runner: Runner) -> list[list[int]]:
    """Two whole prompts of held-out tasks: fixed, and of the kind that the policy really sees."""
    tasks = runner.env.tasks("heldout", 2, 0)
    segments = [runner.renderer.opening(runner.env.opening(task), runner.env.tools) for task in tasks]
    return [[token for segment in opening for token in segment.token_ids] for opening in segments]


def _learner(settings: GrpoSettings, model_path: str, accelerator: Accelerator) -> Learner:
    return Learner(
        load_trained(
            model_path,
            dtype=settings.grpo.dtype,
            lora=settings.lora,
            device=accelerator.device,
            seed=settings.seed,
        ),
        accelerator,
        config=settings.grpo,
        optimizer=settings.optimizer,
        temperature=settings.rollout.sampling.temperature,
        max_trajectory_tokens=settings.rollout.limits.max_trajectory_tokens,
        # Of the folder that the run started from, also where it continues from a checkpoint.
        reference=load_reference(settings.model, config=settings.grpo, lora=settings.lora, device=accelerator.device),
    )


if __name__ == "__main__":
    run_main(main, again=CONTINUES)
