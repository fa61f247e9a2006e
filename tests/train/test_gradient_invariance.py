"""The gradient of a step is that of each sample alone over whole logits, however samples are packed, share their
beginnings, are split and accumulated, and for however many processes the micro-batches are made."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.collator import check_layout, pack
from data.rows import SampleBuilder
from data.types import Segment, Source, TrainingSample
from tests.data.test_types import no_clock
from tests.random_samples import VOCABULARY, tiny_learner, tiny_model
from train.config import GrpoConfig, OptimizerConfig
from train.loss import sample_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def siblings(draw: st.DrawFn) -> list[TrainingSample]:
    """One to five samples; prompts that begin alike, answers and tool results of their own."""
    rng = random.Random(draw(st.integers(0, 2**16)))

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(8, VOCABULARY) for _ in range(rng.randint(low, high)))

    prompt = ids(40, 40)
    samples = []
    for index in range(draw(st.integers(1, 5))):
        builder = SampleBuilder(f"t{index}")
        shared = draw(st.sampled_from([0, 20, 40]))
        builder.add_context(Segment(source=Source.PROMPT, token_ids=prompt[:shared] + ids(0 if shared else 1, 3)))
        for turn in range(draw(st.integers(1, 2))):
            tokens = ids(1, 6)
            segment = Segment(
                source=Source.MODEL, token_ids=tokens, completion_id=f"t{index}/{turn}",
                logprobs=(-1.0,) * len(tokens), policy_version=(0,) * len(tokens),
            )  # fmt: skip
            builder.add_sampled(segment, advantage=rng.uniform(-2, 2), excluded=None)
            builder.add_context(Segment(source=Source.TOOL, token_ids=ids(1, 6)))
        samples.append(builder.build())
    return samples


def alone(samples: Sequence[TrainingSample], weights: Sequence[float]) -> dict[str, Tensor]:
    """The gradient of the advantage-weighted likelihood, which is the surrogate's where every ratio is one."""
    model = tiny_model()
    for sample, weight in zip(samples, weights, strict=True):
        ids = torch.tensor([sample.token_ids])
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1], -1)
        picked = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
        per_token = torch.tensor(sample.advantages[1:]) * torch.tensor(sample.loss_mask[1:])
        (-(weight * per_token * picked).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@settings(no_clock, max_examples=25)
@given(
    samples=siblings(),
    max_tokens=st.sampled_from([80, 120, 1000]),
    processes=st.integers(1, 3),
    checkpointing=st.booleans(),
)
def test_no_packing_changes_the_gradient(
    samples: list[TrainingSample], max_tokens: int, processes: int, checkpointing: bool
) -> None:
    config = GrpoConfig(gradient_checkpointing=checkpointing, vllm_importance_sampling_mode="none")
    learner = tiny_learner(tiny_model(), config, OptimizerConfig())
    weights = sample_weights(samples, "dapo")
    batches = pack(samples, weights, max_tokens=max_tokens, processes=processes)
    for batch in batches:
        check_layout(batch)
    learner.gradient(batches)  # all of them in this one process: what several sum up
    expected = alone(samples, weights)
    found = {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 0.1)
        assert (found[name] - gradient).abs().max().item() <= 1e-5 * scale, name
