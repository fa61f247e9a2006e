"""What does the train benchmark train on? The agent's shape: a group of trajectories with three short turns between
long tool results, and two models."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from data.rows import SampleBuilder
from data.types import Segment, Source, TrainingSample
from train.advantages import group_advantages

GROUP = 8
PROMPT, TURNS, RESULTS = 300, (120, 80, 60), (1500, 900)
SPREAD = 0.25
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.0]
MODELS = ("embedded", "20M")


def make_model(name: str) -> Any:
    """The embedded model, or a random Llama of 20M parameters with a vocabulary of 16,000."""
    if name == "embedded":
        return AutoModelForCausalLM.from_pretrained("models/embedded", dtype=torch.float32, attn_implementation="sdpa")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=3, pad_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def make_group(scale: float, *, seed: int, vocabulary: int, shared: bool = True) -> list[TrainingSample]:
    """The samples of a group, all lengths times `scale`; those that vary by up to `SPREAD`. Without `shared` each has a
    prompt of its own."""
    rng = random.Random(seed)

    def ids(length: float, spread: float = SPREAD) -> tuple[int, ...]:
        count = max(1, round(scale * length * rng.uniform(1 - spread, 1 + spread)))
        return tuple(rng.randrange(8, vocabulary) for _ in range(count))

    prompt = ids(PROMPT, 0.0)
    advantages = group_advantages(REWARDS, scale_rewards="group")
    samples = []
    for index in range(GROUP):
        builder = SampleBuilder(f"t{index}")
        opening = prompt if shared else (8 + index, *prompt[1:])
        builder.add_context(Segment(source=Source.PROMPT, token_ids=opening))
        for turn, length in enumerate(TURNS):
            tokens = ids(length)
            segment = Segment(
                source=Source.MODEL, token_ids=tokens, completion_id=f"t{index}/{turn}",
                logprobs=(-1.0,) * len(tokens), policy_version=(0,) * len(tokens),
            )  # fmt: skip
            builder.add_sampled(segment, advantage=advantages[index] or 0.0, excluded=None)
            if turn < len(RESULTS):
                builder.add_context(Segment(source=Source.TOOL, token_ids=ids(RESULTS[turn])))
        samples.append(builder.build())
    return samples
