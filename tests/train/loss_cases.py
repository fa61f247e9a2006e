"""Random trained tokens, and the loss as the papers write it: one trajectory after the other, differentiated whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from train.config import GrpoConfig
from train.loss import TrainedTokens

MAX_TRAJECTORY_TOKENS = 11


def make_tokens(logprobs: Sequence[float] | Tensor, **columns: Any) -> TrainedTokens:
    """Tokens of one trajectory on policy with advantage and weight 1, but for what is given."""
    current = logprobs if isinstance(logprobs, Tensor) else torch.tensor(logprobs, requires_grad=True)
    like = current.detach()
    given = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in columns.items()}
    defaults: dict[str, Any] = {
        "logprobs": current,
        "old_logprobs": like,
        "sampled_logprobs": given.get("old_logprobs", like),
        "advantages": torch.ones_like(like),
        "weights": torch.ones_like(like),
        "trajectory": torch.zeros(len(like), dtype=torch.long),
        "entropies": torch.ones_like(like),
    }
    return TrainedTokens(**(defaults | given))


def take(tokens: TrainedTokens, index: Tensor) -> TrainedTokens:
    """The tokens at `index`, with trajectories counted from 0 again."""
    columns = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    taken: dict[str, Any] = {name: None if column is None else column[index] for name, column in columns.items()}
    taken["trajectory"] = torch.unique(taken["trajectory"], return_inverse=True)[1]
    return TrainedTokens(**taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: GrpoConfig
    tokens: TrainedTokens

    @property
    def leaf(self) -> Tensor:
        return self.tokens.logprobs


VARIANTS: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "dapo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo", "epsilon_high": 1.5},
    {"loss_type": "rloo"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.5},
]
CORRECTIONS: list[dict[str, Any]] = [
    {"vllm_importance_sampling_mode": "none"},
    {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5},
    {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.7},
    {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.5},
    {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.5},
]


def weights_of(loss_type: str, lengths: Sequence[int]) -> Tensor:
    """The weight of each token, of trajectories of these lengths one after the other."""
    live = sum(1 for n in lengths if n)
    if loss_type in ("dapo", "cispo"):
        each = [1 / sum(lengths) for _ in lengths]
    elif loss_type == "dr_grpo":
        each = [1 / (live * MAX_TRAJECTORY_TOKENS) for _ in lengths]
    else:
        each = [1 / (live * n) for n in lengths]
    return torch.tensor(
        [weight for weight, n in zip(each, lengths, strict=True) for _ in range(n)], dtype=torch.float64
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Trajectories of up to five tokens in float64, off policy on both sides. One advantage for each trajectory, and
    one correction where the ratio is one for each trajectory: only then are the papers' gradients ours."""
    options = draw(st.sampled_from(VARIANTS))
    of_trajectory = options["loss_type"] == "rloo" or "importance_sampling_level" in options
    modes = [c for c in CORRECTIONS if not (of_trajectory and c["vllm_importance_sampling_mode"].startswith("token"))]
    options = options | draw(st.sampled_from(modes))
    config = GrpoConfig(**options, beta=draw(st.sampled_from([0.0, 0.3])))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    n = sum(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def near(base: Tensor, by: float) -> Tensor:
        return base + by * torch.randn(n, generator=generator, dtype=torch.float64)

    old = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    trajectory = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    tokens = TrainedTokens(
        logprobs=near(old, 0.3).requires_grad_(),
        old_logprobs=old,
        sampled_logprobs=near(old, 0.3),
        advantages=advantages[trajectory],
        weights=weights_of(config.loss_type, lengths),
        trajectory=trajectory,
        entropies=torch.rand(n, generator=generator, dtype=torch.float64),
        ref_logprobs=near(old, 0.5) if config.beta else None,
    )
    return Case(config=config, tokens=tokens)


def textbook_loss(case: Case) -> Tensor:
    """The objective of each paper, a trajectory at a time; `[]` with graph."""
    config, t = case.config, case.tokens
    counts = torch.bincount(t.trajectory)
    loss = torch.zeros((), dtype=torch.float64)
    for number, n in enumerate(counts.tolist()):
        own = t.trajectory == number
        log_ratio, engine = (t.logprobs - t.old_logprobs)[own], (t.old_logprobs - t.sampled_logprobs)[own]
        advantage = t.advantages[own][0]
        if config.loss_type == "rloo":
            ratio = log_ratio.sum().exp().expand(n)
        elif config.importance_sampling_level == "sequence":
            ratio = log_ratio.mean().exp().expand(n)
        else:
            ratio = log_ratio.exp()
        if config.loss_type == "cispo":
            objective = torch.where(ratio > config.epsilon_high, config.epsilon_high, ratio).detach()
            objective = objective * advantage * t.logprobs[own]
        else:
            bounded = torch.clip(ratio, 1 - config.epsilon, 1 + config.epsilon_high)
            objective = torch.minimum(ratio * advantage, bounded * advantage)
        objective = objective * textbook_correction(engine, config)
        if config.beta:
            assert t.ref_logprobs is not None
            difference = t.ref_logprobs[own] - t.logprobs[own]
            objective = objective - config.beta * log_ratio.exp() * (difference.exp() - difference - 1)
        if config.loss_type in ("grpo", "rloo"):
            loss = loss - objective.mean() / len(counts)
        elif config.loss_type == "dr_grpo":
            loss = loss - objective.sum() / (len(counts) * MAX_TRAJECTORY_TOKENS)
        else:
            loss = loss - objective.sum() / counts.sum()
    return loss


def textbook_correction(engine: Tensor, config: GrpoConfig) -> Tensor:
    mode, found = config.vllm_importance_sampling_mode, []
    for value in engine.tolist():
        ratio = math.exp(sum(engine.tolist()) if mode.startswith("sequence") else value)
        low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
        if mode == "none":
            ratio = 1.0
        elif mode.endswith("truncate"):
            ratio = min(max(ratio, low), high)
        elif not low <= ratio <= high:
            ratio = 0.0
        found.append(ratio)
    return torch.tensor(found, dtype=torch.float64)
