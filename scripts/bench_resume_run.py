"""A small real GRPO run on a random model, to be killed, or run in several processes; started again, it continues.

python -m scripts.bench_resume_run MODEL OUTPUT_DIR ENGINE STEPS
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from data.ledger import Ledger
from data.template_renderer import TemplateRenderer
from envs.base import Env
from envs.sandbox.open import open_factory
from rollouts.config import EngineConfig, LimitsConfig, PricesConfig, SamplingConfig, ScheduleConfig
from rollouts.engine import RecordingEngine
from rollouts.open_engine import open_engine
from rollouts.runner import Runner
from scripts.bench_resume_env import EvenLength
from train.checkpoint import latest_checkpoint, load_feed, load_state
from train.config import CheckpointConfig, GrpoConfig, HeldOutConfig, OptimizerConfig
from train.group_feed import FeedState
from train.grpo import GrpoRun, Sampling, leave_together
from train.learner import Learner
from train.metrics import MetricsLog, Publisher
from train.model import load_model, load_tokenizer

SEED = 5
SMALL: dict[str, Any] = {
    "num_tasks": 6,
    "tasks_per_step": 2,
    "num_generations": 4,
    "num_mini_batches": 2,
    "max_micro_batch_tokens": 256,
    "max_resampled_groups": 1,
    "mask_truncated_completions": False,
}


def save_small_model(folder: Path, tokenizer_of: str = "models/embedded") -> Path:
    """A random Llama with the embedded model's tokenizer and template."""
    tokenizer = load_tokenizer(tokenizer_of)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=cast(int, tokenizer.eos_token_id),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def engine_config(kind: Literal["vllm", "transformers"]) -> EngineConfig:
    """Sampled one at a time, a completion's rounding does not depend on which ones arrived together, so a run that
    continues can be compared with one that was never killed. vLLM's batches cannot be chosen."""
    together = 1 if kind == "transformers" else 8
    return EngineConfig(kind=kind, dtype="float32", max_context_tokens=128, max_concurrent=together)


async def small_run(
    model: str,
    folder: Path,
    engine_kind: Literal["vllm", "transformers"],
    steps: int,
    *,
    env: Env | None = None,
    max_staleness: int = 0,
    run: Publisher | None = None,
    evaluation: HeldOutConfig | None = None,
) -> None:
    """`run` is what steps are published to."""
    env = env or EvenLength()
    found = latest_checkpoint(folder / "checkpoints")
    model_path, start_after = (str(found[0]), found[1]) if found else (model, 0)
    feed_state = load_feed(found[0]) if found else FeedState()
    tokenizer = load_tokenizer(model)
    config = GrpoConfig.model_validate(SMALL | {"max_steps": steps, "max_staleness": max_staleness})
    is_main = int(os.environ.get("RANK", "0")) == 0
    sampling, log = None, None
    if is_main:
        waiting = {one.group.group_id for one in feed_state.ready}
        ledger = Ledger(folder / "ledger" / "completions.jsonl", keep=feed_state.is_kept, remember=waiting)
        engine = RecordingEngine(
            open_engine(engine_config(engine_kind), model=model_path, can_sleep=max_staleness == 0), ledger
        )
        renderer = TemplateRenderer(tokenizer, name=model)
        # A random model hardly ever samples one certain token; with many that end a turn, some turns do end.
        renderer.stop_token_ids = tuple(range(3, 60))
        runner = Runner(
            engine=engine,
            renderer=renderer,
            env=env,
            sandboxes=await open_factory("local"),
            limits=LimitsConfig(max_turns=2, max_turn_tokens=24, max_trajectory_tokens=24),
            sampling=SamplingConfig(),
            prices=PricesConfig(),
            tool_timeout_s=5.0,
            seed=SEED,
        )
        sampling = Sampling(
            runner=runner,
            engine=engine,
            ledger=ledger,
            probes=[[5, 9, 40, 70, 11, 30]],
            schedule=ScheduleConfig(max_trajectories=8),
            sleeps=max_staleness == 0,
            held_out=env.tasks("heldout", 3, 0),
        )
        log = MetricsLog(folder, start_after=start_after, run=run)
    accelerator = Accelerator(cpu=True)
    learner = Learner(
        load_model(model_path, dtype="float32", device=accelerator.device),
        accelerator,
        config=config,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        temperature=1.0,
    )
    if found:
        learner.load_state(load_state(found[0]))
    training = GrpoRun(
        folder=folder,
        seed=SEED,
        config=config,
        checkpoints=CheckpointConfig(save_steps=2, save_total_limit=2),
        evaluation=evaluation or HeldOutConfig(),
        tasks=env.tasks("train", config.num_tasks, SEED),
        accelerator=accelerator,
        learner=learner,
        tokenizer=tokenizer,
        sampling=sampling,
        log=log,
    )
    await training.train(start_after=start_after, feed_state=feed_state)
    leave_together(accelerator)
    if sampling is not None:
        await sampling.engine.close()
        await sampling.runner.sandboxes.close()


if __name__ == "__main__":
    kind = cast(Literal["vllm", "transformers"], sys.argv[3])
    asyncio.run(small_run(sys.argv[1], Path(sys.argv[2]), kind, int(sys.argv[4])))
