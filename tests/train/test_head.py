"""The head in chunks: log_softmax's numbers and gradients, whatever the chunk, the type or what is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data.test_types import no_clock
from train.head import head_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(n: int, width: int, vocabulary: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Hidden states, targets, weight, bias: distributions that are far from flat."""
    generator = torch.Generator().manual_seed(n + 31 * width + 977 * vocabulary)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    targets = torch.randint(vocabulary, (n,), generator=generator)
    return [normal(n, width), targets, normal(vocabulary, width), normal(vocabulary) if bias else None]


def plain(hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Any:
    """All logits at once."""
    distribution = torch.log_softmax(nn.functional.linear(hidden, weight, bias).float() / temperature, -1)
    return distribution.gather(-1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@no_clock
@given(
    n=st.integers(0, 9),
    width=st.integers(1, 8),
    vocabulary=st.integers(1, 12),
    bias=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    chunk_rows=st.integers(1, 10),
)
def test_numbers_and_gradients_are_those_of_log_softmax(
    n: int, width: int, vocabulary: int, bias: bool, temperature: float, chunk_rows: int
) -> None:
    found = []
    for function in (head_logprobs, plain):
        hidden, targets, weight, offset = inputs(n, width, vocabulary, bias=bias)
        leaves = [tensor.requires_grad_() for tensor in (hidden, weight, offset) if tensor is not None]
        options: dict[str, Any] = {"chunk_rows": chunk_rows} if function is head_logprobs else {}
        logprobs, entropies = function(hidden, targets, weight, offset, temperature=temperature, **options)
        (logprobs * torch.arange(1.0, n + 1)).sum().backward()
        found.append([logprobs.detach(), entropies.detach(), *(leaf.grad for leaf in leaves)])
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        tolerance = 2e-6 if number < 2 else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck_in_double(bias: bool) -> None:
    hidden, targets, weight, offset = inputs(5, 3, 7, bias=bias, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, offset) if tensor is not None]

    def logprobs(hidden: Tensor, weight: Tensor, offset: Tensor | None = None) -> Tensor:
        return head_logprobs(hidden, targets, weight, offset, temperature=0.7, chunk_rows=2)[0]

    assert torch.autograd.gradcheck(logprobs, leaves)


def test_large_logits_do_not_overflow() -> None:
    """exp(1000) is infinite."""
    hidden = torch.tensor([[1000.0, 0.0, 0.0]], requires_grad=True)
    logprobs, entropies = head_logprobs(hidden, torch.tensor([1]), torch.eye(3))
    logprobs.sum().backward()
    assert (logprobs.item(), entropies.item()) == (-1000.0, 0.0)
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[-1.0, 1.0, 0.0]]


def test_entropies_have_no_gradient() -> None:
    hidden, targets, weight, _ = inputs(3, 4, 5, bias=False)
    _, entropies = head_logprobs(hidden.requires_grad_(), targets, weight)
    assert not entropies.requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    hidden, targets, weight, _ = inputs(3, 4, 5, bias=False)
    (weight if frozen == "hidden" else hidden).requires_grad_()
    head_logprobs(hidden, targets, weight)[0].sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_bfloat16_is_reduced_in_float32() -> None:
    """Rounding of the inputs alone: sums over 5,000 words in bfloat16 would be off by far more."""
    hidden, targets, weight, _ = inputs(16, 64, 5000, bias=False)
    hidden = hidden / 8
    rough = [tensor.to(torch.bfloat16).requires_grad_() for tensor in (hidden, weight)]
    logprobs, entropies = head_logprobs(rough[0], targets, rough[1], chunk_rows=3)
    assert logprobs.dtype == entropies.dtype == torch.float32
    exact, exact_entropies = plain(rough[0].float(), targets, rough[1].float(), None, 1.0)
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=0.02)
    torch.testing.assert_close(entropies, exact_entropies, rtol=0, atol=0.01)
    logprobs.sum().backward()
    assert [tensor.grad.dtype for tensor in rough if tensor.grad is not None] == [torch.bfloat16] * 2


def test_autocast_decides_the_type_of_the_products_and_weights_get_float32_gradients() -> None:
    hidden, targets, weight, _ = inputs(6, 16, 40, bias=False)
    exact = head_logprobs(hidden, targets, weight)[0]
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = head_logprobs(hidden, targets, weight)
    assert logprobs.dtype == torch.float32
    assert 0 < (logprobs - exact).abs().max() < 0.2
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """The largest number of elements that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


def test_no_more_than_a_chunk_of_logits_is_ever_made() -> None:
    hidden, targets, weight, _ = inputs(400, 4, 300, bias=False)
    with LargestTensor() as largest:
        logprobs, _ = head_logprobs(hidden.requires_grad_(), targets, weight.requires_grad_(), chunk_rows=8)
        logprobs.sum().backward()
    assert largest.numbers == 8 * 300
