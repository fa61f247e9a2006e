"""The model that is trained: loading it, and logprobs of exactly the tokens that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data.collator import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ValueError: the folder or its tokenizer is not there.
    """
    _check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path}: no tokenizer can be loaded: {_first_line(error)}") from error


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What rows are filled up with; padding is told by position, so any id will do where a tokenizer has none."""
    return tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0


def load_model(path: str, *, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model of a folder, in training mode.

    Raises:
        ValueError: the folder is not there or holds no causal language model, or its head does more than
            a matrix product (its logits could not be had at single positions).
    """
    _check_folder(path)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path}: no causal language model can be loaded: {_first_line(error)}") from error
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1.0):
            raise ValueError(f"model {path}: {name} is not supported by the trainer's head")
    return model.to(device).train()


def hidden_states(model: PreTrainedModel, token_ids: Tensor, position_ids: Tensor) -> Tensor:
    """The head's input `[R, C, H]`. `use_cache=False` is what makes the restarts of `position_ids` separate packed
    samples; with a cache, transformers lets them see each other."""
    decoder: Any = model.get_decoder()
    return decoder(input_ids=token_ids, position_ids=position_ids, use_cache=False).last_hidden_state


def trained_logprobs(model: PreTrainedModel, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs `[n]` (nats) and entropies `[n]` (no graph) at the batch's trained tokens, row by row.

    The token in column t is predicted by the hidden state of column t - 1; only those states go through the head.
    """
    hidden = hidden_states(model, batch.token_ids, batch.position_ids)
    predicts = batch.loss_mask[:, 1:]
    return token_logprobs(model, hidden[:, :-1][predicts], batch.token_ids[:, 1:][predicts], temperature=temperature)


def token_logprobs(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies `[n]` of `targets [n]` given head inputs `[n, H]`, at the sampling temperature."""
    head: Any = model.get_output_embeddings()
    distribution = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets[:, None])[:, 0], entropy


@torch.no_grad()
def score(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Logprobs `[n - 1]` (nats, temperature 1) of tokens 1 to n-1: what the engine's `score` must equal."""
    ids = torch.tensor([list(token_ids)], device=model.device)
    hidden = hidden_states(model, ids, torch.arange(ids.shape[1], device=model.device)[None])
    logprobs, _ = token_logprobs(model, hidden[0, :-1], ids[0, 1:], temperature=1.0)
    return logprobs.tolist()


def _check_folder(path: str) -> None:
    if not Path(path).is_dir():
        raise ValueError(f"model {path}: no such folder")
    if not (Path(path) / "config.json").exists():
        raise ValueError(f"model {path}: the folder has no config.json; is it a Hugging Face model folder?")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
