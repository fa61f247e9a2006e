"""The model that is trained: loading it, and logprobs of exactly the tokens that are trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from data.collator import MicroBatch
from train.head import head_logprobs

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


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What rows are filled up with; padding is told by position, so any id will do where a tokenizer has none."""
    return tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0


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
    """Score two random samples alone and packed into one row, the way that the trainer does, and compare.

    Packed samples are kept apart by `position_ids` alone, and only attention heeds them: recurrent and convolutional
    layers carry on across the border. And logits that are more than the head's matrix product (a cap, a scale) could
    not be had at single positions. The model is left in evaluation mode.

    Raises:
        ValueError: packed samples see each other, or the model's own logits are others than its head gives.
    """
    model.eval()
    embeddings: Any = model.get_input_embeddings()
    n = _CHECK_TOKENS
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(embeddings.num_embeddings, (1, 2 * n), generator=generator).to(model.device)
    hidden = hidden_states(model, token_ids, torch.arange(n, device=model.device).repeat(2)[None])
    packed, _ = token_logprobs(model, hidden[0, :-1], token_ids[0, 1:], temperature=1.0)
    packed_gap = own_gap = 0.0
    for first in (0, n):
        one = token_ids[:, first : first + n]
        alone = torch.tensor(score(model, one[0].tolist()), device=model.device)
        logits = model(input_ids=one, use_cache=False).logits[0, :-1].float()
        own = torch.log_softmax(logits, dim=-1).gather(-1, one[0, 1:, None])[:, 0]
        packed_gap = max(packed_gap, (packed[first : first + n - 1] - alone).abs().mean().item())
        own_gap = max(own_gap, (own - alone).abs().mean().item())
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    kind = type(model).__name__
    if packed_gap > tolerance:
        raise ValueError(
            f"model {name}: samples packed into one row see each other in {kind} (their logprobs move by "
            f"{packed_gap:.2g} nats on average), so it cannot be trained here; take one that keeps them apart by "
            "position_ids, as Llama and Qwen3 do"
        )
    if own_gap > tolerance:
        raise ValueError(
            f"model {name}: the logits of {kind} are more than its head's matrix product, a cap or a scale (logprobs "
            f"differ by {own_gap:.2g} nats on average), so it cannot be trained here; take a model without"
        )


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
    return head_logprobs(hidden, targets, head.weight, head.bias, temperature=temperature)


@torch.no_grad()
def score(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Logprobs `[n - 1]` (nats, temperature 1) of tokens 1 to n-1: what the engine's `score` must equal."""
    ids = torch.tensor([list(token_ids)], device=model.device)
    hidden = hidden_states(model, ids, torch.arange(ids.shape[1], device=model.device)[None])
    logprobs, _ = token_logprobs(model, hidden[0, :-1], ids[0, 1:], temperature=1.0)
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
