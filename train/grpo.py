"""The GRPO run: sample groups → rewards → advantages → samples → gate → one update → sync → checkpoint.

Process 0 owns the engine and the sandboxes, and samples for all; every process takes its share of the update.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase

from data.collator import MicroBatch, check_layout, unpack
from data.gate import GateError, check_batch
from data.ledger import Ledger
from data.rows import write_samples
from data.types import TrainingSample
from envs.types import Task
from rollouts.config import ScheduleConfig
from rollouts.engine import Engine
from rollouts.outage import OutageError
from rollouts.record import write_trajectories
from rollouts.runner import Runner
from rollouts.samples import group_samples
from rollouts.scheduler import Scheduler, ScheduleStatus
from rollouts.summary import summarise
from rollouts.tally import Tally
from rollouts.types import Trajectory, TrajectoryGroup
from rollouts.weight_check import WeightCheck, check_weights
from train.advantages import group_advantages
from train.checkpoint import save_checkpoint, save_final
from train.config import CheckpointConfig, GrpoConfig
from train.learner import Learner
from train.lora import full_state_dict
from train.metrics import MetricsLog

WhileSampling = Callable[[Tally, Callable[[], ScheduleStatus]], AbstractAsyncContextManager[None]]

_GO_ON = "start the same command again to go on from the last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What process 0 samples with. `probes` are fixed token ids on which engine and trainer must agree; `sleeps`: the
    engine gives its memory to the trainer during updates."""

    runner: Runner
    engine: Engine
    ledger: Ledger
    probes: Sequence[Sequence[int]]
    schedule: ScheduleConfig
    sleeps: bool = False


@dataclass(slots=True, kw_only=True)
class GrpoRun:
    """A run and its parts. `sampling` and `log` are there in process 0 only. `while_sampling` is entered while a step's
    trajectories are sampled, with what has ended of them and with what tells where their schedule stands."""

    folder: Path
    seed: int
    config: GrpoConfig
    checkpoints: CheckpointConfig
    tasks: Sequence[Task]
    accelerator: Accelerator
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling | None
    log: MetricsLog | None
    last_check: WeightCheck | None = None
    while_sampling: WhileSampling = lambda tally, status: nullcontext()
    on_step: Callable[[Mapping[str, Any]], None] = lambda row: None

    async def train(self, *, start_after: int) -> None:
        """Run the steps after `start_after` to the end.

        Raises:
            ValueError: a whole step was lost to failures of engine, sandbox or environment.
            GateError: a batch was not what the policy sampled; it is in `gate_violation.jsonl`, nothing was trained.
            WeightSyncError: engine and trainer disagree after a sync.
        """
        if self.sampling is not None:
            await self._sync(start_after)
        for step in range(start_after + 1, self.config.max_steps + 1):
            started = time.perf_counter()
            samples, row = await self._sample(step)
            sampled = time.perf_counter()
            updates = [self.learner.pack(part) for part in mini_batches(samples, self.config.num_mini_batches)]
            updates = [batches for batches in updates if batches]
            self._gate(step, [batch for batches in updates for batch in batches], samples)
            if updates:
                async with self._engine_asleep():
                    row |= mean_metrics(self.learner.update_step(updates))
            self.learner.end_step()
            updated = time.perf_counter()
            if updates and self.sampling is not None:
                await self._sync(step)
            done = time.perf_counter()
            row |= {
                "time/rollout_s": sampled - started,
                "time/update_s": updated - sampled,
                "time/sync_s": done - updated,
            }
            if self.last_check is not None:
                row["sync/logprob_gap_max"] = self.last_check.largest_difference
            self._finish_step(step, row)
        if self.log is not None and not (self.folder / "final").exists():
            save_final(self.folder, model=self.learner.model, tokenizer=self.tokenizer)

    async def _sample(self, step: int) -> tuple[list[TrainingSample], dict[str, Any]]:
        """The step's samples, in every process, and the row of metrics that describes them."""
        message: list[Any] = [None, None, None]
        if self.sampling is not None:
            self.sampling.ledger.forget()
            try:
                message = await self._roll_out(self.sampling, step)
            except OutageError as error:
                message = [None, None, f"step {step}: {error}; {_GO_ON}"]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(message)
        samples, row, lost = message
        if lost is not None:
            raise ValueError(lost)
        return samples, {"step": step} | row

    async def _roll_out(self, sampling: Sampling, step: int) -> list[Any]:
        """What every process is told: samples, metrics, and why all is lost, if it is."""
        tasks = step_tasks(self.tasks, step, self.config.tasks_per_step, self.seed)
        groups = await sample_step(sampling, tasks, step, self.config.num_generations, self.while_sampling)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        write_trajectories(self.folder / "trajectories" / f"step-{step:06d}.jsonl", trajectories)
        return [*samples_and_metrics(groups, self.config), _why_lost(step, trajectories)]

    def _gate(self, step: int, batches: Sequence[MicroBatch], samples: Sequence[TrainingSample]) -> None:
        """Check the packed batch, and what was left out of it, against the ledger; every process stops if it fails."""
        verdict: list[str | None] = [None]
        if self.sampling is not None:
            packed = [sample for batch in batches for sample in unpack(batch)]
            left_out = [sample for sample in samples if not any(sample.loss_mask)]
            write_samples(self.folder / "samples" / f"step-{step:06d}.jsonl", [*packed, *left_out])
            try:
                for batch in batches:
                    check_layout(batch)
                check_batch([*packed, *left_out], self.sampling.ledger)
            except GateError as error:
                write_samples(self.folder / "gate_violation.jsonl", [*packed, *left_out])
                verdict = [f"step {step}: {error}; the batch is in {self.folder / 'gate_violation.jsonl'}"]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(verdict)
        if verdict[0] is not None:
            raise GateError(verdict[0])

    @asynccontextmanager
    async def _engine_asleep(self) -> AsyncIterator[None]:
        """While this lasts, the engine's memory is the trainer's."""
        if self.sampling is None or not self.sampling.sleeps:
            yield
            return
        await self.sampling.engine.sleep()
        yield
        await self.sampling.engine.wake()

    async def _sync(self, version: int) -> None:
        """Give the trainer's weights to the engine, and check that they arrived."""
        assert self.sampling is not None
        await self.sampling.engine.load_weights(full_state_dict(self.learner.model), version)
        self.last_check = await check_weights(
            self.sampling.engine,
            self.learner.score,
            self.sampling.probes,
            self.config.sync_tolerance,
            self.last_check,
        )

    def _finish_step(self, step: int, row: dict[str, Any]) -> None:
        if self.log is None:
            return
        self.log.write(row)
        self.on_step(row)
        if step % self.checkpoints.save_steps == 0 or step == self.config.max_steps:
            save_checkpoint(
                self.folder / "checkpoints",
                step,
                model=self.learner.model,
                tokenizer=self.tokenizer,
                state=self.learner.state(),
                keep=self.checkpoints.save_total_limit,
            )
            self.log.publish()


async def sample_step(
    sampling: Sampling, tasks: Sequence[Task], step: int, num_generations: int, while_sampling: WhileSampling
) -> list[TrajectoryGroup]:
    """The groups of a step, in the order of its tasks; see `rollouts.scheduler.sample_groups`."""
    tally, schedule = Tally(), sampling.schedule
    async with Scheduler(sampling.runner, schedule, on_done=tally.add, on_lost=tally.add_begun_again) as scheduler:
        for task in tasks:
            scheduler.submit(task, group_id=f"step-{step}/{task.task_id}", siblings=range(num_generations))
        async with while_sampling(tally, lambda: scheduler.status):
            groups = {group.group_id: group async for group in scheduler}
    return [groups[f"step-{step}/{task.task_id}"] for task in tasks]


def _why_lost(step: int, trajectories: Sequence[Trajectory]) -> str | None:
    """Why a step without a graded trajectory ends the run: the next one would fare no better, and a run of such steps
    would look finished."""
    if any(trajectory.reward is not None for trajectory in trajectories):
        return None
    return (
        f"step {step}: none of its {len(trajectories)} trajectories could be graded: {trajectories[0].cause}; {_GO_ON}"
    )


def mini_batches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """`samples` in `count` parts of about equal size, each with trajectories of as many groups as there are.

    Siblings are dealt out one by one, so a part holds the successes and the failures of a group together as a rule. The
    samples of a trajectory stay together: its ratio and its mean are over all of them.
    """
    turn = {name: number % count for number, name in enumerate(dict.fromkeys(s.trajectory_id for s in samples))}
    return [[sample for sample in samples if turn[sample.trajectory_id] == part] for part in range(count)]


def mean_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the updates of a step; of a maximum the maximum."""
    return {
        name: max(row[name] for row in rows) if name.endswith("/max") else sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }


def samples_and_metrics(
    groups: Sequence[TrajectoryGroup], config: GrpoConfig
) -> tuple[list[TrainingSample], dict[str, Any]]:
    """Groups → advantages → samples, with the metrics of the sampling."""
    samples: list[TrainingSample] = []
    dead = 0
    for group in groups:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        advantages = group_advantages(rewards, scale_rewards=config.scale_rewards)
        dead += not any(advantages)
        samples += group_samples(group, advantages, mask_truncated=config.mask_truncated_completions)
    excluded = Counter(reason.value for sample in samples for reason in sample.excluded if reason is not None)
    row = summarise(
        [trajectory for group in groups for trajectory in group.trajectories],
        [trajectory for group in groups for trajectory in group.lost],
    )
    row |= {
        "groups/dead": dead / len(groups),
        "tokens/total": sum(len(sample) for sample in samples),
        "tokens/trained": sum(sum(sample.loss_mask) for sample in samples),
    }
    return samples, row | {f"tokens/excluded/{reason}": count for reason, count in excluded.items()}


def step_tasks(tasks: Sequence[Task], step: int, count: int, seed: int) -> list[Task]:
    """The tasks of a step (1, 2, …): each epoch goes through all of them in its own order, and drops what is left over
    at its end. The same arguments give the same tasks, so a run that continues sees what it would have seen."""
    steps_per_epoch = len(tasks) // count
    epoch, place = divmod(step - 1, steps_per_epoch)
    order = random.Random(f"{seed}/{epoch}").sample(range(len(tasks)), len(tasks))
    return [tasks[index] for index in order[place * count : (place + 1) * count]]


def check_sizes(config: GrpoConfig, tasks: Sequence[Task], *, max_context_tokens: int) -> None:
    """Refuse, before anything is loaded, what could not train.

    Raises:
        ValueError: fewer tasks than a step takes, fewer trajectories than mini-batches, or a micro-batch smaller than a
            trajectory can be.
    """
    if len(tasks) < config.tasks_per_step:
        raise ValueError(
            f"the task set has {len(tasks)} tasks, fewer than tasks_per_step = {config.tasks_per_step}; "
            "lower grpo.tasks_per_step or raise grpo.num_tasks"
        )
    if config.num_mini_batches > config.tasks_per_step * config.num_generations:
        raise ValueError(
            f"grpo.num_mini_batches = {config.num_mini_batches} is more than the "
            f"{config.tasks_per_step * config.num_generations} trajectories of a step"
        )
    if config.max_micro_batch_tokens < max_context_tokens:
        raise ValueError(
            f"grpo.max_micro_batch_tokens = {config.max_micro_batch_tokens} is smaller than "
            f"rollout.engine.max_context_tokens = {max_context_tokens}: the longest trajectory would not fit"
        )
