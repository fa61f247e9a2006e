"""`run_grpo --dry-run`: what would happen, before hours are spent on it."""

from __future__ import annotations

from pathlib import Path

import tomli_w
import torch
from rich.console import Console

from data.ledger import Ledger
from rollouts.scheduler import sample_groups
from scripts.open_rollouts import open_runner
from scripts.settings import GrpoSettings, resolved
from train.lora import load_trained
from train.model import DTYPES
from train.report.masks import sample_view
from train.report.terminal import print_masks
from train.report.token_text import Vocabulary
from train.step_samples import samples_and_metrics


async def dry_run(settings: GrpoSettings) -> None:
    """Print the resolved configuration, the memory that training needs, and the loss mask of one rolled-out task."""
    console = Console()
    console.print(tomli_w.dumps(resolved(settings)), highlight=False, markup=False)
    console.print(memory_line(settings), highlight=False)
    async with open_runner(settings.rollout, model=settings.model, seed=settings.seed, ledger=Ledger()) as runner:
        tasks = runner.env.tasks("train", 1, settings.seed)
        groups = await sample_groups(
            runner,
            tasks,
            num_generations=settings.grpo.num_generations,
            prefix="dry-run",
            schedule=settings.rollout.schedule,
        )
    samples, row = samples_and_metrics(groups, settings.grpo, trained_version=0)
    rewards = [trajectory.reward for trajectory in groups[0].trajectories]
    console.print(f"one task, rewards {rewards}, {row['tokens/trained']} of {row['tokens/total']} tokens would train")
    vocabulary = Vocabulary.from_folder(Path(settings.model))
    view = sample_view(samples[0], vocabulary, kind="packed", trajectory=groups[0].trajectories[0])
    print_masks(console, [view], title="dry run", rows=len(samples))


def memory_line(settings: GrpoSettings) -> str:
    """An estimate of the trainer's memory: the static part exactly, the rest from the micro-batch."""
    cpu = torch.device("cpu")
    model = load_trained(settings.model, dtype=settings.grpo.dtype, lora=settings.lora, device=cpu, seed=settings.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    static = stored + trained * 4 * 3  # gradient and AdamW's two moments, in float32
    width = torch.finfo(DTYPES[settings.grpo.dtype]).bits // 8
    config = model.config
    tokens = settings.grpo.max_micro_batch_tokens
    # A decoder layer keeps about 16 activations of the hidden size for the backward pass; with checkpointing, one.
    kept = 1 if settings.grpo.gradient_checkpointing else 16
    activations = tokens * config.hidden_size * config.num_hidden_layers * kept * width
    logits = tokens * config.vocab_size * 4 * 3
    total = static + activations + logits
    return (
        f"memory of the trainer: about {_size(total)}: {_size(static)} for weights, gradients and optimizer "
        f"({trained:,} of {parameters:,} parameters are trained), up to {_size(activations)} of activations and "
        f"{_size(logits)} of logits for a micro-batch of {tokens} tokens"
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
