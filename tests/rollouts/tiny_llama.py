"""A random Llama of 0.4 million parameters that vLLM can load, and what it says of a sequence, in plain torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.types import SamplingParams

VOCAB_SIZE = 600
MAX_CONTEXT = 384


def make_llama(seed: int, *, head_dim: int = 32) -> LlamaForCausalLM:
    """vLLM's CPU attention takes a `head_dim` of 32, 64, 80, ..."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,  # so that distributions are not flat
    )
    return LlamaForCausalLM(config).eval()


def save_llama(folder: Path, seed: int, *, head_dim: int = 32) -> Path:
    make_llama(seed, head_dim=head_dim).save_pretrained(folder)
    return folder


def reference_logprobs(
    model: LlamaForCausalLM, token_ids: Sequence[int], temperature: float = 1.0, top_p: float = 1.0
) -> list[float]:
    """Logprobs `[n - 1]` of tokens 1 to n-1, written without any code of the engines."""
    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)])).logits[0, :-1].double() / temperature
    probs = logits.softmax(-1)
    if top_p < 1:
        for row in probs:
            order = row.argsort(descending=True)
            kept = int((row[order].cumsum(0) < top_p).sum()) + 1  # the token that crosses the border stays
            row[order[kept:]] = 0
        probs = probs / probs.sum(-1, keepdim=True)
    return [float(probs[i, token].log()) for i, token in enumerate(token_ids[1:])]


def reference_greedy(model: LlamaForCausalLM, prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt_ids) :])


def some_prompt(number: int, length: int = 20) -> list[int]:
    return [3 + (number * 131 + position * 17 + position * position) % (VOCAB_SIZE - 3) for position in range(length)]


def reference_completion(
    model: LlamaForCausalLM, prompt_ids: Sequence[int], sampled_ids: Sequence[int], params: SamplingParams
) -> list[float]:
    """Logprobs of a completion under all of `params` but the grammar, token by token in plain Python."""
    ids = [*prompt_ids, *sampled_ids]
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, len(prompt_ids) - 1 : -1].double().tolist()
    return [
        _reference_token(row, token, prompt_ids, sampled_ids[:place], params)
        for place, (row, token) in enumerate(zip(rows, sampled_ids, strict=True))
    ]


def _reference_token(
    logits: list[float], token: int, prompt_ids: Sequence[int], before: Sequence[int], params: SamplingParams
) -> float:
    for seen in {*prompt_ids, *before}:
        logits[seen] *= params.repetition_penalty if logits[seen] < 0 else 1 / params.repetition_penalty
    for sampled, times in Counter(before).items():
        logits[sampled] -= params.frequency_penalty * times + params.presence_penalty
    weights = {i: math.exp((logit - max(logits)) / params.temperature) for i, logit in enumerate(logits)}
    weights = {i: weight for i, weight in weights.items() if weight >= params.min_p}  # the largest weight is 1
    if params.top_k:
        weights = dict(sorted(weights.items(), key=lambda item: -item[1])[: params.top_k])
    kept, total = {}, 0.0
    for i, weight in sorted(weights.items(), key=lambda item: -item[1]):
        if total < params.top_p * sum(weights.values()):  # the token that crosses the border stays
            kept[i], total = weight, total + weight
    return math.log(kept[token] / total)
