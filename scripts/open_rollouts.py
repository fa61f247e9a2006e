"""Opening what samples: tokenizer and renderer, environment, sandboxes, engine; cheap checks before slow loads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from data.chat import Renderer, TemplateRenderer
from data.ledger import Ledger
from envs.base import Env
from rollouts.config import RolloutConfig
from rollouts.engine import RecordingEngine
from rollouts.open_engine import open_engine
from rollouts.runner import Runner
from rollouts.scheduler import sample_groups
from rollouts.types import TrajectoryGroup
from scripts.console import progress
from scripts.open_env import open_env, open_sandboxes
from scripts.settings import EvalSettings
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


@asynccontextmanager
async def open_runner(config: RolloutConfig, *, model: str, seed: int, ledger: Ledger) -> AsyncIterator[Runner]:
    """A runner over a model folder.

    Raises:
        ValueError: the folder, its tokenizer or its chat template cannot be used, or no turn fits the context.
        SandboxUnavailableError: there is no sandbox of the configured kind here.
        EngineError: the engine did not start.
    """
    renderer = TemplateRenderer(load_tokenizer(model), name=model)
    async with open_sandboxes(config.sandbox) as sandboxes:
        env = open_env(config.env, sandboxes=sandboxes)
        check_context(renderer, env, max_context_tokens=config.engine.max_context_tokens)
        engine = RecordingEngine(open_engine(config.engine, model=model), ledger)
        try:
            yield Runner(
                engine=engine,
                renderer=renderer,
                env=env,
                sandboxes=sandboxes,
                limits=config.limits,
                temperature=config.sampling.temperature,
                tool_timeout_s=config.sandbox.tool_timeout_s,
                seed=seed,
            )
        finally:
            await engine.close()


async def attempt_tasks(settings: EvalSettings) -> list[TrajectoryGroup]:
    """Attempt the configured tasks, `settings.attempts` times each, with a progress bar; errors as `open_runner`."""
    async with open_runner(settings.rollout, model=settings.model, seed=settings.seed, ledger=Ledger()) as runner:
        # The tasks are the same whatever the seed of the run, so that runs can be compared.
        tasks = runner.env.tasks(settings.evaluation.split, settings.evaluation.num_tasks, 0)
        with progress() as bar:
            place = bar.add_task("attempts", total=len(tasks) * settings.attempts, note="")
            return await sample_groups(
                runner,
                tasks,
                num_generations=settings.attempts,
                prefix=settings.name,
                schedule=settings.rollout.schedule,
                on_done=lambda _: bar.advance(place),
            )
