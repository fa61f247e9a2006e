"""The GRPO run: sample groups → rewards → advantages → samples → gate → one update → sync → checkpoint.

Process 0 owns the engine and the sandboxes, and samples for all; every process takes its share of the update. The
trainer works in a thread of its own, so that sampling can go on beside it; how far ahead, `group_feed` decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase

from data.collator import MicroBatch
from data.gate import GateError
from data.ledger import Ledger
from data.rows import write_samples
from data.types import TrainingSample
from envs.types import Task
from rollouts.config import ScheduleConfig
from rollouts.engine import Engine, SyncReport
from rollouts.outage import OutageError
from rollouts.record import write_trajectories
from rollouts.runner import Runner
from rollouts.scheduler import Scheduler, ScheduleStatus
from rollouts.tally import Tally
from rollouts.weight_check import WeightCheck, check_pushed, check_weights
from train.advantages import is_dead
from train.alarms import alarms
from train.checkpoint import is_best, save_best, save_checkpoint, save_final
from train.config import CheckpointConfig, GrpoConfig, HeldOutConfig
from train.group_feed import FeedState, GroupFeed, StepGroups
from train.held_out import evaluate_held_out, metrics_of
from train.learner import Learner
from train.lora import adapter_weights, full_state_dict
from train.metrics import MetricsLog
from train.step_samples import check_updates, mini_batches, packed_samples, samples_and_metrics, why_lost

WhileSampling = Callable[[Tally, Callable[[], ScheduleStatus]], AbstractAsyncContextManager[None]]

T = TypeVar("T")

_GO_ON = "start the same command again to go on from the last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What process 0 samples with. `probes` are fixed token ids on which engine and trainer must agree; `sleeps`: the
    engine gives its memory to the trainer during updates; `syncs_adapter`: it gets adapters and no full weights.
    `held_out` tasks are what evaluations attempt."""

    runner: Runner
    engine: Engine
    ledger: Ledger
    probes: Sequence[Sequence[int]]
    schedule: ScheduleConfig
    sleeps: bool = False
    syncs_adapter: bool = False
    held_out: Sequence[Task] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A step's groups with all that was sampled for them; or in words, why the run cannot go on."""

    groups: StepGroups
    ledger: Ledger
    lost: str | None


@dataclass(slots=True, kw_only=True)
class GrpoRun:
    """A run and its parts. `sampling` and `log` are there in process 0 only. `while_sampling` is entered while a step
    waits for its trajectories, with what has ended since the last one and with what tells where the schedule stands.
    `on_alarm` hears what goes wrong when it begins (`alarms`)."""

    folder: Path
    seed: int
    config: GrpoConfig
    checkpoints: CheckpointConfig
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    tasks: Sequence[Task]
    accelerator: Accelerator
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling | None
    log: MetricsLog | None
    last_check: WeightCheck | None = None
    while_sampling: WhileSampling = lambda tally, status: nullcontext()
    on_step: Callable[[Mapping[str, Any]], None] = lambda row: None
    on_alarm: Callable[[str], None] = lambda line: None
    _tally: Tally = field(init=False, default_factory=Tally)
    _thread: ThreadPoolExecutor = field(init=False)

    async def train(self, *, start_after: int, feed_state: FeedState | None = None) -> None:
        """Run the steps after `start_after` to the end; `feed_state` is what their checkpoint says of sampling.

        Raises:
            ValueError: a whole step was lost to failures of engine, sandbox or environment.
            GateError: a batch was not what the policy sampled; it is in `gate_violation.jsonl`, nothing was trained.
            WeightSyncError: engine and trainer disagree after a sync.
        """
        if self.log is not None:
            self.log.publish()  # a run may have been killed between its checkpoint and this
        async with AsyncExitStack() as stack:
            # One thread, so that what belongs to a thread (CUDA's device, the order of collectives) stays the same.
            self._thread = stack.enter_context(
                ThreadPoolExecutor(1, "trainer", _use_device, (self.accelerator.device,))
            )
            feed: GroupFeed | None = None
            scheduler: Scheduler | None = None
            if self.sampling is not None:
                await self._sync(self.sampling, start_after)
                scheduler = await stack.enter_async_context(self._scheduler(self.sampling))
                feed = self._feed(scheduler, feed_state or FeedState())
            for step in range(start_after + 1, self.config.max_steps + 1):
                self._finish_step(step, await self._step(step, feed, scheduler), feed)
        if self.log is not None and not (self.folder / "final").exists():
            save_final(self.folder, model=self.learner.model, tokenizer=self.tokenizer)

    async def _step(self, step: int, feed: GroupFeed | None, scheduler: Scheduler | None) -> dict[str, Any]:
        """One round of sampling, update and sync; returns its row of metrics."""
        started = time.perf_counter()
        taken = await self._take(step, feed, scheduler)
        sampled = time.perf_counter()
        updates, row = await self._beside(self._prepare, step, taken)
        if updates:
            async with self._engine_asleep():
                row |= await self._beside(self.learner.update_step, updates)
        self.learner.end_step()
        updated = time.perf_counter()
        if updates and self.sampling is not None:
            is_updated = row.get("grad_norm", 0) > 0 and row.get("learning_rate", 0) > 0
            report = await self._sync(self.sampling, step, is_updated=is_updated)
            row |= {"sync/caches_dropped": report.caches_dropped, "sync/requests_running": report.requests_running}
        synced = time.perf_counter()
        row |= {
            "time/rollout_s": sampled - started,
            "time/update_s": updated - sampled,
            "time/sync_s": synced - updated,
        }
        if self.sampling is not None and self._is_evaluated(step):
            row |= await self._evaluate(self.sampling, step)
            row["time/eval_s"] = time.perf_counter() - synced
        if self.last_check is not None:
            row["sync/logprob_gap_max"] = self.last_check.largest_difference
        return row

    async def _beside(self, work: Callable[..., T], *arguments: Any) -> T:
        """The trainer's work, in its thread: sampling goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _scheduler(self, sampling: Sampling) -> Scheduler:
        return Scheduler(
            sampling.runner,
            sampling.schedule,
            on_done=lambda trajectory: self._tally.add(trajectory),
            on_lost=lambda attempt: self._tally.add_begun_again(attempt),
        )

    def _feed(self, scheduler: Scheduler, state: FeedState) -> GroupFeed:
        return GroupFeed(
            scheduler,
            self.tasks,
            config=self.config,
            seed=self.seed,
            is_dead=lambda group: is_dead(group, self.config),
            state=state,
        )

    async def _take(self, step: int, feed: GroupFeed | None, scheduler: Scheduler | None) -> _Taken | None:
        """What process 0 has for the step."""
        if self.sampling is None or feed is None or scheduler is None:
            return None
        try:
            async with self.while_sampling(self._tally, lambda: scheduler.status):
                groups = await feed.take(step)
        except OutageError as error:
            none = StepGroups(trained=(), replaced=())
            return _Taken(groups=none, ledger=Ledger(), lost=f"step {step}: {error}; {_GO_ON}")
        self._tally = Tally()
        group_ids = {group.group_id for group in (*groups.trained, *groups.replaced)}
        return _Taken(groups=groups, ledger=self.sampling.ledger.take(group_ids), lost=None)

    def _prepare(self, step: int, taken: _Taken | None) -> tuple[list[list[MicroBatch]], dict[str, Any]]:
        """What each update of the step is made of, checked, and the row of metrics that describes the sampling; the
        same in every process.

        Raises:
            ValueError: there is nothing that could be graded.
            GateError: see `train`.
        """
        message: list[Any] = [None, None, None]
        if taken is not None:
            message = self._samples(step, taken) if taken.lost is None else [None, None, taken.lost]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(message)
        samples, row, lost = message
        if lost is not None:
            raise ValueError(lost)
        updates = [self.learner.pack(part) for part in mini_batches(samples, self.config.num_mini_batches)]
        updates = [batches for batches in updates if batches]
        verdict = [None if taken is None else self._gate(step, updates, samples, taken.ledger)]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(verdict)
        if verdict[0] is not None:
            raise GateError(verdict[0])
        return updates, {"step": step} | row

    def _samples(self, step: int, taken: _Taken) -> list[Any]:
        """What every process is told: samples, metrics, and why all is lost, if it is."""
        groups = [*taken.groups.trained, *taken.groups.replaced]
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        write_trajectories(self.folder / "trajectories" / f"step-{step:06d}.jsonl", trajectories)
        samples, row = samples_and_metrics(
            taken.groups.trained, self.config, replaced=taken.groups.replaced, trained_version=step - 1
        )
        row["groups/replaced"] = len(taken.groups.replaced)
        cause = why_lost(trajectories)
        return [samples, row, None if cause is None else f"step {step}: {cause}; {_GO_ON}"]

    def _gate(
        self, step: int, updates: Sequence[Sequence[MicroBatch]], samples: Sequence[TrainingSample], ledger: Ledger
    ) -> str | None:
        """Check the packed batches, and what was left out of them, against the ledger; returns what is wrong."""
        packed = packed_samples(updates, samples)
        write_samples(self.folder / "samples" / f"step-{step:06d}.jsonl", packed)
        try:
            check_updates(updates, packed, ledger)
        except GateError as error:
            write_samples(self.folder / "gate_violation.jsonl", packed)
            return f"step {step}: {error}; the batch is in {self.folder / 'gate_violation.jsonl'}"
        return None

    @asynccontextmanager
    async def _engine_asleep(self) -> AsyncIterator[None]:
        """While this lasts, the engine's memory is the trainer's."""
        if self.sampling is None or not self.sampling.sleeps:
            yield
            return
        await self.sampling.engine.sleep()
        yield
        await self.sampling.engine.wake()

    async def _sync(self, sampling: Sampling, version: int, *, is_updated: bool = False) -> SyncReport:
        """Give the trainer's weights to the engine, and check that they arrived."""
        if sampling.syncs_adapter:
            report = await sampling.engine.load_adapter(adapter_weights(self.learner.model), version)
        else:
            report = await sampling.engine.load_weights(full_state_dict(self.learner.model), version)
        check_pushed(report, is_updated=is_updated)
        self.last_check = await check_weights(
            sampling.engine, self.learner.score, sampling.probes, self.config.sync_tolerance, self.last_check
        )
        return report

    def _is_evaluated(self, step: int) -> bool:
        every = self.evaluation.eval_steps
        return every > 0 and (step % every == 0 or step == self.config.max_steps)

    async def _evaluate(self, sampling: Sampling, step: int) -> dict[str, float]:
        """Attempt the held-out tasks; weights that are better than all before are kept."""
        attempts = self.evaluation.attempts
        result = await evaluate_held_out(
            sampling.runner, sampling.held_out, step=step, attempts=attempts, schedule=sampling.schedule
        )
        if is_best(self.folder, result.success):
            model, tokenizer = self.learner.model, self.tokenizer
            save_best(self.folder, step, result.success, model=model, tokenizer=tokenizer)
        return metrics_of(result)

    def _finish_step(self, step: int, row: dict[str, Any], feed: GroupFeed | None) -> None:
        if self.log is None or feed is None:
            return
        self.log.write(row)
        self.on_step(row)
        for line in alarms(self.log.rows):
            self.on_alarm(line)
        if step % self.checkpoints.save_steps == 0 or step == self.config.max_steps:
            save_checkpoint(
                self.folder / "checkpoints",
                step,
                model=self.learner.model,
                tokenizer=self.tokenizer,
                state=self.learner.state(),
                feed=feed.state(),
                keep=self.checkpoints.save_total_limit,
            )
            self.log.publish()


def _use_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def leave_together(accelerator: Accelerator) -> None:
    """End the group of several processes while all are there: the threads of one that is left to the interpreter's end
    can abort it. One process alone has none, and what there is belongs to the engine."""
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        accelerator.end_training()


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
