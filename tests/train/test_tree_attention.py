"""Tree attention: a row of pieces computes what each sample alone does, with the model's own attention, forward and
backward, for the kinds of attention that models have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.prefix_tree import Piece, piece_path
from tests.data.test_types import no_clock
from tests.random_samples import VOCABULARY, tiny_model
from tests.train.test_model import GPT2, make
from train.config import LoraSettings
from train.lora import add_lora
from train.model import hidden_states
from train.tree_attention import tree_attention, use_tree_attention

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped heads": ("llama", {}),
    "qwen2, bias": ("qwen2", {}),
    "qwen3, normed heads": ("qwen3", {"head_dim": 16}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "gemma3, window in some layers": ("gemma3_text", {"head_dim": 16, "sliding_window": 5}),
    "gpt2, a place for each position": ("gpt2", GPT2),
}


@st.composite
def trees(draw: st.DrawFn) -> list[Piece]:
    """Pieces of any shape: several roots, long chains, siblings."""
    pieces: list[Piece] = []
    for number in range(draw(st.integers(1, 7))):
        start = pieces[-1].stop if pieces else 0
        parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        pieces.append(Piece(start=start, stop=start + draw(st.integers(1, 9)), parent=parent))
    return pieces


def paths_of(pieces: list[Piece]) -> list[Tensor]:
    """The columns of each piece with its ancestors."""
    return [
        torch.cat([torch.arange(pieces[i].start, pieces[i].stop) for i in piece_path(pieces, number)])
        for number in range(len(pieces))
    ]


def row_of(pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """Token ids and positions `[C]`."""
    generator = torch.Generator().manual_seed(len(pieces))
    token_ids = torch.randint(8, VOCABULARY, (pieces[-1].stop,), generator=generator)
    position_ids = torch.zeros_like(token_ids)
    for path in paths_of(pieces):
        position_ids[path] = torch.arange(len(path))
    return token_ids, position_ids


def own_states(model: Any, pieces: list[Piece], token_ids: Tensor) -> Tensor:
    """The hidden states `[C, H]` of each piece at the end of its path alone, by the model's own attention."""
    parts = []
    for piece, path in zip(pieces, paths_of(pieces), strict=True):
        states = model.get_decoder()(input_ids=token_ids[path][None], use_cache=False).last_hidden_state[0]
        parts.append(states[len(path) - len(piece) :])
    return torch.cat(parts)


def gradients(model: Any, states: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every number has a weight of its own."""
    weights = torch.linspace(-1, 1, states.numel()).view_as(states)
    (states * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Within `tolerance` of the largest number of the gradient."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 1.0)
        assert (found[name] - gradient).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("name", KINDS)
@settings(no_clock, max_examples=20)
@given(pieces=trees())
def test_every_path_is_as_if_alone(name: str, pieces: list[Piece]) -> None:
    kind, options = KINDS[name]
    model = make(kind, **options).eval()
    token_ids, position_ids = row_of(pieces)
    expected = own_states(model, pieces, token_ids)
    own = gradients(model, expected)
    found = hidden_states(model, token_ids, position_ids, pieces)
    scale = max(expected.abs().max().item(), 1.0)
    assert (found - expected).abs().max().item() <= 1e-5 * scale
    assert_close(gradients(model, found), own, 2e-5)


def forked() -> list[Piece]:
    lengths, parents = [6, 4, 3, 5], [None, 0, 0, 1]
    ends = [sum(lengths[: i + 1]) for i in range(4)]
    return [Piece(start=end - n, stop=end, parent=p) for end, n, p in zip(ends, lengths, parents, strict=True)]


@pytest.mark.parametrize("adapters", [False, True])
def test_it_survives_gradient_checkpointing_and_adapters(adapters: bool) -> None:
    """Checkpointed layers are computed again in the backward pass, and must see the same pieces."""
    pieces = forked()
    token_ids, position_ids = row_of(pieces)

    def model() -> Any:
        made = add_lora(tiny_model(), LoraSettings(rank=4 if adapters else 0), seed=0).train()
        for parameter_name, parameter in made.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(1))
        return made

    plain, checkpointed = model(), model()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    expected = gradients(plain, own_states(plain, pieces, token_ids))
    found = gradients(checkpointed, hidden_states(checkpointed, token_ids, position_ids, pieces))
    assert_close(found, expected, 2e-5)


def test_autocast_computes_attention_in_its_type() -> None:
    pieces = forked()
    token_ids, position_ids = row_of(pieces)
    model = tiny_model().eval()
    exact = own_states(model, pieces, token_ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = hidden_states(model, token_ids, position_ids, pieces)
    assert 0 < (rough - exact).abs().max() < 0.3


def test_a_model_called_without_pieces_says_so() -> None:
    model = tiny_model()
    use_tree_attention(model)
    with pytest.raises(
        ValueError, match=r"^the row's pieces do not reach LlamaAttention: the model was not called thr"
    ):
        model(input_ids=torch.tensor([[9, 8]]))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_changes_the_weights_of_attention_is_refused(name: str) -> None:
    zeros = torch.zeros(1, 1, 2, 4)
    whole = [Piece(start=0, stop=2, parent=None)]
    others: dict[str, Any] = {name: torch.ones(1)}
    with pytest.raises(ValueError, match=f"^its attention has {name}, which"):
        tree_attention(torch.nn.Module(), zeros, zeros, zeros, None, pieces=whole, **others)
