"""What the warm start trains on, decided before its first step: rows, their order, and that they teach to stop."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.chat import Renderer
from data.demonstrations import DemonstrationReport, read_demonstrations, to_samples
from data.types import Source, TrainingSample
from train.config import SftConfig

IGNORED = -100
"""The label of a token that is not trained."""

_POOL_STEPS = 16
"""Rows are sorted by length within so many steps: little padding, and still another mixture each epoch."""


def load_samples(
    config: SftConfig, renderer: Renderer, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[TrainingSample], DemonstrationReport]:
    """The rows to train on, and what became of the file.

    Raises:
        ValueError: there is no such file, a line cannot be read, no row is left, or a turn does not end as
            `check_samples` wants it.
    """
    path = Path(config.data)
    if not path.is_file():
        raise ValueError(f"{path}: no such file of demonstrations; make one with scripts.make_data or set sft.data")
    try:
        samples, report = to_samples(read_demonstrations(path), renderer, max_length=config.max_length)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    check_samples(samples, renderer.stop_token_ids, tokenizer)
    return samples, report


def check_samples(
    samples: Sequence[TrainingSample], stop_token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse rows that train anything but a demonstration's own turns, or turns that would not teach to stop.

    Raises:
        ValueError: a trained token is not TARGET, or the last token of a trained turn is none that sampling stops at.
    """
    for sample in samples:
        for position, trained in enumerate(sample.loss_mask):
            if not trained:
                continue
            source, token = sample.source[position], sample.token_ids[position]
            if source is not Source.TARGET:
                raise ValueError(f"{sample.trajectory_id}: token {position} is trained and {source.value}, not target")
            is_last = position + 1 == len(sample) or not sample.loss_mask[position + 1]
            if is_last and token not in stop_token_ids:
                stops = ", ".join(repr(tokenizer.decode([stop])) for stop in stop_token_ids)
                raise ValueError(
                    f"{sample.trajectory_id}: a trained turn ends with {tokenizer.decode([token])!r}, but sampling "
                    f"stops at {stops}: the model would never learn to stop"
                )


def trained_by_source(samples: Sequence[TrainingSample]) -> str:
    """How many tokens of each source are trained, zeros too, in words."""
    counts = Counter(
        source for sample in samples for source, trained in zip(sample.source, sample.loss_mask, strict=True) if trained
    )
    return ", ".join(f"{counts[source]} {source.value}" for source in Source)


def count_steps(config: SftConfig, rows: int, *, rows_per_step: int) -> int:
    """Optimizer steps of the whole run.

    Raises:
        ValueError: there are fewer rows than one step takes.
    """
    if rows < rows_per_step:
        raise ValueError(
            f"{config.data}: {rows} rows are fewer than the {rows_per_step} of one step (batch size · accumulation · "
            "processes); lower sft.per_device_train_batch_size or sft.gradient_accumulation_steps"
        )
    if config.max_steps > 0:
        return config.max_steps
    return math.ceil(config.num_train_epochs * (rows // rows_per_step))


def training_order(lengths: Sequence[int], *, rows_per_step: int, steps: int, seed: int) -> list[int]:
    """Indices of the rows of the whole run, step after step `[steps · rows_per_step]`.

    Each epoch shuffles all rows, leaves out what does not fill a step, and gives rows of like length to one step.
    Nothing but the arguments decides, so a run that continues sees what it would have seen.

    >>> training_order([5, 50, 6, 60], rows_per_step=2, steps=2, seed=0)
    [0, 2, 1, 3]
    """
    order: list[int] = []
    full = len(lengths) // rows_per_step * rows_per_step
    pool = rows_per_step * _POOL_STEPS
    for epoch in range(math.ceil(steps * rows_per_step / full)):
        rng = random.Random(f"{seed}/{epoch}")
        rows = rng.sample(range(len(lengths)), full)
        grouped = [
            index
            for start in range(0, full, pool)
            for index in sorted(rows[start : start + pool], key=lambda index: lengths[index])
        ]
        batches = [grouped[start : start + rows_per_step] for start in range(0, full, rows_per_step)]
        rng.shuffle(batches)
        order += [index for batch in batches for index in batch]
    return order[: steps * rows_per_step]


def ordered_dataset(samples: Sequence[TrainingSample], order: Sequence[int]) -> Dataset:
    """The run's rows as TRL takes them, in training order: `input_ids [L]` and `labels [L]`, `IGNORED` where a token
    is not trained. The mask decides, never the id."""
    labels = [
        [token if trained else IGNORED for token, trained in zip(s.token_ids, s.loss_mask, strict=True)]
        for s in samples
    ]
    rows = Dataset.from_dict({"input_ids": [list(sample.token_ids) for sample in samples], "labels": labels})
    # An epoch costs indices, not copies.
    return rows.select(order)
