"""The model that is trained: loading it, and logprobs of exactly the tokens that are trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from data.collator import MicroBatch
from data.prefix_tree import Piece
from train.head import head_logprobs
from train.tree_attention import use_tree_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_CHECK_TOKENS = 16
_TOLERANCE = {torch.float32: 0.005, torch.bfloat16: 0.1}
"""Nats, of the mean over a sample's tokens. Rounding stays below a tenth of it; what a pretrained model carries over a
border, or a cap of its logits, is far above."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder.

    Raises:
        ValueError: the folder or its tokenizer is not there.
    """
    check_model_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        # Other files do as well where a package is there that reads them, so it is asked for only afterwards.
        there = (Path(path) / "tokenizer.json").exists()
        why = _first_line(error) if there else "there is no tokenizer.json in it"
        raise ValueError(f"model {path}: no tokenizer can be loaded: {why}") from error


def load_model(path: str, *, dtype: str, device: torch.device) -> PreTrainedModel:
    """The model of a folder, in training mode.

    Raises:
        ValueError: the folder is not there or holds no causal language model, or the trainer's logprobs would not be
            the model's (see `check_scoring`).
    """
    check_model_folder(path)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"model {path}: no causal language model can be loaded: {_first_line(error)}") from error
    model = model.to(device)
    check_scoring(model, name=path)
    return model.train()


@torch.no_grad()
def check_scoring(model: PreTrainedModel, *, name: str) -> None:
    """Score random samples alone and packed into one row, where two share their beginning, the way that the trainer
    does, and compare.

    Packed samples are kept apart by attention alone: recurrent and convolutional layers carry on across the border. And
    logits that are more than the head's matrix product (a cap, a scale) could not be had at single positions. The model
    is left in evaluation mode, with the attention that it had.

    Raises:
        ValueError: packed samples see each other, attention or logits are more than can be computed here, or the
            model's own logits are others.
    """
    model.eval()
    attention = str(model.config._attn_implementation)
    try:
        packed_gap, own_gap = _scoring_gaps(model)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"model {name}: {_first_line(error)}, so it cannot be trained here") from error
    finally:
        model.set_attn_implementation(attention)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    kind = type(model).__name__
    # Written so that NaN is refused as well.
    if not packed_gap <= tolerance:
        raise ValueError(
            f"model {name}: samples packed into one row see each other in {kind} (their logprobs move by "
            f"{packed_gap:.2g} nats on average), so it cannot be trained here; take one whose layers only attend, as "
            "those of Llama and Qwen3 do"
        )
    if not own_gap <= tolerance:
        raise ValueError(
            f"model {name}: the logits of {kind} are more than its head's matrix product, a cap or a scale (logprobs "
            f"differ by {own_gap:.2g} nats on average), so it cannot be trained here; take a model without"
        )


def _scoring_gaps(model: PreTrainedModel) -> tuple[float, float]:
    """How far logprobs of packed samples are from those alone, and the model's own from both (nats, means of a
    sample's tokens, the largest)."""
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise ValueError(f"the head of {type(model).__name__} is no linear layer")
    embeddings: Any = model.get_input_embeddings()
    n = _CHECK_TOKENS
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(embeddings.num_embeddings, (4 * n,), generator=generator).to(model.device)
    parents = (None, 0, 0, None)
    pieces = [Piece(start=i * n, stop=(i + 1) * n, parent=parent) for i, parent in enumerate(parents)]
    paths = [(0, 1), (0, 2), (3,)]
    columns = [torch.cat([torch.arange(i * n, (i + 1) * n) for i in path]).to(model.device) for path in paths]
    # The model's own logits come first, with its own attention.
    own = [model(input_ids=token_ids[None, path], use_cache=False).logits[0, :-1].float() for path in columns]
    ends = torch.arange(n, device=model.device)
    hidden = hidden_states(model, token_ids, torch.cat([ends, ends + n, ends + n, ends]), pieces)
    packed_gap = own_gap = 0.0
    for path, logits in zip(columns, own, strict=True):
        ids = token_ids[path]
        alone = torch.tensor(score(model, ids.tolist()), device=model.device)
        packed, _ = token_logprobs(model, hidden[path[:-1]], ids[1:], temperature=1.0)
        plain = torch.log_softmax(logits, dim=-1).gather(-1, ids[1:, None])[:, 0]
        packed_gap = max(packed_gap, (packed - alone).abs().mean().item(), key=_nan_last)
        own_gap = max(own_gap, (plain - alone).abs().mean().item(), key=_nan_last)
    return packed_gap, own_gap


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def disable_dropout(model: PreTrainedModel) -> None:
    """Make training mode compute what evaluation mode does: a policy update compares the trainer's probabilities with
    those that sampled, and dropout would make every ratio noise. (Evaluation mode itself would switch gradient
    checkpointing off.)

    Layers keep their rate as `p` or under a name of their own, and some read the configuration each time; a checkpoint
    therefore says 0 as well.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for owner in (module, config) if isinstance(config, PreTrainedConfig) else (module,):
            for name, value in list(vars(owner).items()):
                is_rate = "drop" in name or "jitter" in name or (name == "p" and "Dropout" in type(owner).__name__)
                if is_rate and isinstance(value, float):
                    setattr(owner, name, 0.0)


def computing(dtype: str, device: torch.device) -> torch.autocast:
    """Inside it, matrix products are computed in `dtype`, whatever the weights are kept in; float32 changes nothing."""
    return torch.autocast(device.type, dtype=DTYPES[dtype], enabled=dtype != "float32")


def hidden_states(model: PreTrainedModel, token_ids: Tensor, position_ids: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The head's input `[C, H]` for a row's `token_ids [C]` and `position_ids [C]`; see `train.tree_attention`."""
    use_tree_attention(model)
    decoder: Any = model.get_decoder()
    row = {"input_ids": token_ids[None], "position_ids": position_ids[None]}
    return decoder(**row, use_cache=False, pieces=pieces).last_hidden_state[0]


def trained_logprobs(model: PreTrainedModel, batch: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs `[n]` (nats) and entropies `[n]` (no graph) at the batch's trained tokens, by column.

    A token is predicted by the hidden state of the token before it; only those states go through the head.
    """
    hidden = hidden_states(model, batch.token_ids, batch.position_ids, batch.pieces)
    predictors = batch.previous[batch.loss_mask]
    return token_logprobs(model, hidden[predictors], batch.token_ids[batch.loss_mask], temperature=temperature)


def token_logprobs(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies `[n]` of `targets [n]` given head inputs `[n, H]`, at the sampling temperature."""
    head: Any = model.get_output_embeddings()
    return head_logprobs(hidden, targets, head.weight, head.bias, temperature=temperature)


@torch.no_grad()
def score(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Logprobs `[n - 1]` (nats, temperature 1) of tokens 1 to n-1: what the engine's `score` must equal."""
    ids = torch.tensor(list(token_ids), device=model.device)
    whole = [Piece(start=0, stop=len(ids), parent=None)]
    hidden = hidden_states(model, ids, torch.arange(len(ids), device=model.device), whole)
    logprobs, _ = token_logprobs(model, hidden[:-1], ids[1:], temperature=1.0)
    return logprobs.tolist()


def check_model_folder(path: str) -> None:
    """Refuse what is plainly no model folder, before anything slow or long.

    Raises:
        ValueError: it is not there, or has no `config.json`.
    """
    if not Path(path).is_dir():
        raise ValueError(
            f"model {path}: no such folder; run first what makes it (run_sft, run_grpo), or name another with --model"
        )
    if not (Path(path) / "config.json").exists():
        raise ValueError(f"model {path}: the folder has no config.json; is it a Hugging Face model folder?")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
