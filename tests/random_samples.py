"""A random tiny Llama and random samples: enough to check gradients with."""

from __future__ import annotations

import random

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from data.rows import SampleBuilder
from data.types import Segment, Source, TrainingSample
from train.config import GrpoConfig, OptimizerConfig
from train.learner import Learner

VOCABULARY = 97


def tiny_model(seed: int = 0, *, tie_word_embeddings: bool = True) -> LlamaForCausalLM:
    """A random two-layer model in float32; its distributions are far from flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def tiny_learner(model: PreTrainedModel, config: GrpoConfig, optimizer: OptimizerConfig) -> Learner:
    """A learner in this one process, for samples as `random_samples` makes them."""
    return Learner(model, Accelerator(cpu=True), config=config, optimizer=optimizer, temperature=1.0)


def random_samples(count: int, *, seed: int = 0, advantages: list[float] | None = None) -> list[TrainingSample]:
    """Samples with a prompt, and two or three sampled turns with observations between them; a constant logprob."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(8, VOCABULARY) for _ in range(rng.randint(low, high)))

    samples = []
    for index in range(count):
        builder = SampleBuilder(f"t{index}")
        builder.add_context(Segment(source=Source.PROMPT, token_ids=ids(4, 12)))
        for turn in range(rng.randint(2, 3)):
            tokens = ids(2, 9)
            segment = Segment(
                source=Source.MODEL,
                token_ids=tokens,
                completion_id=f"t{index}/{turn}",
                logprobs=(-1.0,) * len(tokens),
                policy_version=(0,) * len(tokens),
            )
            builder.add_sampled(segment, advantage=advantages[index] if advantages else 1.0, excluded=None)
            builder.add_context(Segment(source=Source.TOOL, token_ids=ids(1, 8)))
        samples.append(builder.build())
    return samples
