"""Opening what samples: tokenizer and renderer, environment, sandboxes, engine; cheap checks before slow loads."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from data.chat import Renderer
from data.ledger import Ledger
from data.open_renderer import open_renderer
from envs.base import Env
from envs.types import Task
from rollouts.accounting import check_prices
from rollouts.config import RolloutConfig, ScheduleConfig
from rollouts.engine import RecordingEngine
from rollouts.open_engine import open_engine
from rollouts.runner import Runner
from rollouts.scheduler import Scheduler
from rollouts.tally import Tally
from rollouts.types import Trajectory, TrajectoryGroup
from scripts.open_env import open_env, open_sandboxes
from scripts.rollout_progress import show_rollouts
from train.model import load_tokenizer


def check_context(renderer: Renderer, env: Env, *, max_context_tokens: int) -> None:
    """Refuse a context that the prompt of a task fills: every attempt would fail without having sampled a token.

    Raises:
        ValueError: no turn fits.
    """
    task = env.tasks("heldout", 1, 0)[0]
    tokens = sum(len(segment.token_ids) for segment in renderer.opening(env.opening(task), env.tools))
    if tokens >= max_context_tokens:
        raise ValueError(
            f"rollout.engine.max_context_tokens is {max_context_tokens}, but a prompt alone ({task.task_id}) has "
            f"{tokens} tokens, so no turn fits; raise it"
        )


def renderer_of(config: RolloutConfig, model: str) -> Renderer:
    """The renderer for a model folder.

    Raises:
        ValueError: the folder, its tokenizer or its chat template cannot be used.
    """
    return open_renderer(load_tokenizer(model), model=model, **config.renderer.model_dump())


@asynccontextmanager
async def open_runner(
    config: RolloutConfig,
    *,
    model: str,
    seed: int,
    ledger: Ledger,
    trains: bool = False,
    adapter_rank: int = 0,
    can_sleep: bool = False,
) -> AsyncIterator[Runner]:
    """A runner over a model folder. `trains`: its engine will be given a trainer's weights, or with an `adapter_rank`
    its adapters alone; `can_sleep`: and told to give its memory to that trainer.

    Raises:
        ValueError: the folder, its tokenizer or its chat template cannot be used, no turn fits the context, or a money
            limit has no prices.
        SandboxUnavailableError: there is no sandbox of the configured kind here.
        EngineError: the engine did not start.
    """
    check_prices(config.limits, config.prices)
    renderer = renderer_of(config, model)
    print(f"rollouts: {renderer.description}", file=sys.stderr, flush=True)
    async with open_sandboxes(config.sandbox) as sandboxes:
        env = open_env(config.env, sandboxes=sandboxes)
        check_context(renderer, env, max_context_tokens=config.engine.max_context_tokens)
        engine = RecordingEngine(
            open_engine(
                config.engine,
                model=model,
                constrain_calls=config.sampling.constrain_calls,
                can_sleep=can_sleep,
                takes_weights=trains,
                adapter_rank=adapter_rank,
                wall_clock_s=config.limits.wall_clock_s,
            ),
            ledger,
        )
        try:
            yield Runner(
                engine=engine,
                renderer=renderer,
                env=env,
                sandboxes=sandboxes,
                limits=config.limits,
                sampling=config.sampling,
                prices=config.prices,
                tool_timeout_s=config.sandbox.tool_timeout_s,
                seed=seed,
            )
        finally:
            await engine.close()


async def roll_out(
    runner: Runner,
    missing: Sequence[tuple[Task, Sequence[int]]],
    *,
    prefix: str,
    schedule: ScheduleConfig,
    tally: Tally,
    on_done: Callable[[Trajectory], None],
    on_group: Callable[[TrajectoryGroup], None] = lambda group: None,
) -> None:
    """Sample the siblings that are missing of each task, and show how it goes.

    Args:
        prefix: groups are `{prefix}/{task_id}`.
        tally: what is there already; each trajectory is added to it, and what attempts cost that are begun again.
        on_done: hears of each trajectory as it ends.
        on_group: hears of each group when its last trajectory is over.

    Raises:
        OutageError: nothing ends but by failures of our machinery.
    """

    def ended(trajectory: Trajectory) -> None:
        on_done(trajectory)
        tally.add(trajectory)  # after it: what could not be recorded is not there

    total = tally.trajectories + sum(len(siblings) for _, siblings in missing)
    async with Scheduler(runner, schedule, on_done=ended, on_lost=tally.add_begun_again) as scheduler:
        for task, siblings in missing:
            scheduler.submit(task, group_id=f"{prefix}/{task.task_id}", siblings=siblings)
        async with show_rollouts(total, tally, lambda: scheduler.status):
            async for group in scheduler:
                on_group(group)
