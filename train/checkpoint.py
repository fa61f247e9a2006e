"""Checkpoints: everything a run needs to go on, written so that a kill leaves the old one or the new one, whole.

A checkpoint is an ordinary Hugging Face model folder (weights, tokenizer, chat template) with `trainer_state.pt` beside
the weights, and `groups.jsonl`: the groups that were sampled and not yet trained, and the place in the row of tasks.
Seeds are made from the run's seed and the completion's id, so there is no random state to keep.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from train.group_feed import FeedState, read_feed_state, write_feed_state
from train.lora import full_state_dict

_STATE = "trainer_state.pt"
_FEED = "groups.jsonl"
_SUCCESS = "held_out.json"


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint of a run, and its step."""
    found = sorted(path for path in folder.glob("step-*") if (path / _STATE).exists())
    return (found[-1], int(found[-1].name.removeprefix("step-"))) if found else None


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    feed: FeedState,
    keep: int,
) -> Path:
    """Write the checkpoint of `step` beside the others, move it into place, and remove all but the newest `keep`."""
    final = checkpoint_path(folder, step)
    temporary = folder / f".{final.name}.partial"
    _save_model(temporary, model, tokenizer)
    write_feed_state(temporary / _FEED, feed)
    torch.save(state, temporary / _STATE)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    return final


def save_final(folder: Path, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write a finished run's model to `folder/final`, in one move: when it is there, the run has finished."""
    temporary = folder / ".final.partial"
    _save_model(temporary, model, tokenizer)
    return temporary.rename(folder / "final")


def is_best(folder: Path, success: float) -> bool:
    """Whether the model in `folder/best` is worse than this."""
    path = folder / "best" / _SUCCESS
    return not path.exists() or success > json.loads(path.read_text())["success"]


def save_best(
    folder: Path, step: int, success: float, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write the best model so far to `folder/best`, with its step and held-out success beside the weights. A kill in
    the middle leaves none, and the next evaluation writes it."""
    temporary, final = folder / ".best.partial", folder / "best"
    _save_model(temporary, model, tokenizer)
    (temporary / _SUCCESS).write_text(json.dumps({"step": step, "success": success}) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    return temporary.rename(final)


def _save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, state_dict=full_state_dict(model))
    tokenizer.save_pretrained(folder)


def load_feed(checkpoint: Path) -> FeedState:
    """Where sampling stood at a checkpoint.

    Raises:
        ValueError: its file is damaged.
    """
    return read_feed_state(checkpoint / _FEED)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The optimizer and schedule of a checkpoint."""
    return torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
