"""The language-model head at trained positions only: logprobs and entropies without the logits ever being held whole.

Logits are the largest thing of a step: 2,000 trained tokens of a vocabulary of 150,000 are 1.2 GB in float32, and a
softmax and its gradient hold them three times over. Here a chunk of rows is reduced to two numbers a row and forgotten;
the backward pass computes the chunk's logits again. This is the chunked cross entropy of Liger Kernel
(arXiv:2410.10989) and Cut Cross-Entropy (arXiv:2411.09009), with logprobs instead of a loss as its result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 1024
"""Rows of logits at once; more are not faster."""
CHUNK_NUMBERS = 2**26
"""Logits at once (256 MiB in float32), which bounds the rows where the vocabulary is large."""


def head_logprobs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs `[n]` (nats) of `targets [n]`, and entropies `[n]` (nats, no graph), given the head's inputs
    `hidden [n, H]`, its `weight [V, H]` and `bias [V]`.

    The same as `log_softmax((hidden @ weight.T + bias) / temperature)`. Matrix products are computed in the type of
    `hidden`, or in autocast's inside it; every sum over the vocabulary in at least float32, and so is the result. The
    gradient of the weight is summed over the chunks in at least float32 too.

    One hidden state, a vocabulary of three, logits ln 1, ln 2 and ln 1 in a head that is the unit matrix:

    >>> import math
    >>> hidden = torch.tensor([[0.0, math.log(2), 0.0]])
    >>> logprobs, entropies = head_logprobs(hidden, torch.tensor([1]), torch.eye(3))
    >>> [round(value, 4) for value in (*logprobs.exp().tolist(), *entropies.tolist())]
    [0.5, 1.0397]
    """
    rows = chunk_rows or max(1, min(CHUNK_ROWS, CHUNK_NUMBERS // len(weight)))
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    logprobs, entropies = _Head.apply(hidden, targets, weight, bias, temperature, rows, dtype)  # type: ignore[misc]
    return logprobs, entropies


class _Head(torch.autograd.Function):
    """Rows in chunks; what backward needs of a chunk besides its inputs is computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        rows: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(dtype, torch.float32)
        logprobs, entropies = (torch.empty(len(hidden), dtype=precise, device=hidden.device) for _ in range(2))
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            logits = _scaled_logits(hidden[part].to(dtype), cast_weight, cast_bias, temperature, precise)
            logprobs[part], entropies[part] = _reduce(logits, targets[part])
        ctx.save_for_backward(hidden, targets, weight, bias)
        ctx.temperature, ctx.rows, ctx.dtype = temperature, rows, dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, targets, weight, bias = ctx.saved_tensors
        upstream, dtype = grad_outputs[0], ctx.dtype
        precise = torch.promote_types(dtype, torch.float32)
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=precise) if ctx.needs_input_grad[2] else None
        to_bias = torch.zeros_like(bias, dtype=precise) if bias is not None and ctx.needs_input_grad[3] else None
        for first in range(0, len(hidden), ctx.rows):
            part = slice(first, first + ctx.rows)
            states = hidden[part].to(dtype)
            logits = _scaled_logits(states, cast_weight, cast_bias, ctx.temperature, precise)
            to_logits = _gradient(logits, targets[part], upstream[part] / ctx.temperature)
            if to_bias is not None:
                to_bias += to_logits.sum(0)
            to_logits = to_logits.to(dtype)
            if to_hidden is not None:
                to_hidden[part] = to_logits @ cast_weight
            if to_weight is not None:
                to_weight += to_logits.T @ states
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if bias is None or to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, None, to_weight, to_bias, None, None, None


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, precise: torch.dtype
) -> Tensor:
    """Logits `[r, V]` at the temperature, the largest of each row moved to 0: what a softmax is computed from."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden, weight, bias).to(precise)
    logits -= logits.amax(-1, keepdim=True)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _reduce(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies `[r]` of logits `[r, V]` as `_scaled_logits` gives them.

    With Z the sum of exp(logit): log p = logit − log Z, and the entropy is log Z − the mean logit under p.
    """
    weights = logits.exp()
    total = weights.sum(-1)
    log_total = total.log()
    mean = weights.mul_(logits).sum(-1) / total
    return logits.gather(-1, targets[:, None])[:, 0] - log_total, log_total - mean


def _gradient(logits: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    """The gradient `[r, V]` at the logits, in their place: `upstream [r]` times (one at the target − p)."""
    weights = logits.exp_()
    gradient = weights.mul_((-upstream / weights.sum(-1))[:, None])
    gradient.scatter_add_(-1, targets[:, None], upstream[:, None].to(gradient.dtype))
    return gradient
