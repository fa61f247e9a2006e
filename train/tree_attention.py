"""How does a row of pieces attend, so that each piece sees its ancestors and itself, and nothing else?

It is an attention function of transformers (`AttentionInterface`), so the models stay as they are. For each piece the
queries, keys and values of its path, from the root on, are put one after the other and attend causally, as the sample
alone would, with the same kernel and without a mask; what comes out for the piece itself is kept. Linear layers compute
a shared beginning once; attention repeats it for each sample that has it, which is the square of its length.

Left out: what is in the row, and in which pieces (`data.collator`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from data.prefix_tree import Piece, piece_path

TREE_ATTENTION = "agentgrad_tree"

_UNSERVED = ("softcap", "s_aux", "position_bias")
"""What some models hand to their attention besides, and change its weights with: caps, sinks, biases."""


def use_tree_attention(model: PreTrainedModel) -> None:
    """Make a model attend by pieces; its decoder then needs `pieces=`. It stays so, since gradient checkpointing
    computes layers again long after the forward pass.

    Raises:
        ValueError: the model has an attention of its own that cannot be replaced.
    """
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, _window)
    if model.config._attn_implementation == TREE_ATTENTION:
        return
    kind = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ValueError(f"the attention of {kind} cannot be replaced; take a model that uses transformers' interface")
    model.set_attn_implementation(TREE_ATTENTION)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    pieces: Sequence[Piece] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention `[1, C, heads, V]` of `query [1, heads, C, D]`, `key [1, key heads, C, D]` and
    `value [1, key heads, C, V]` over a row's `pieces`.

    `attention_mask` is what `_window` gives: how many tokens back a token sees in this layer, itself included, or None
    for all of them.

    A row of three tokens in the pieces `a`, `b` and `c`, where b and c continue a: b sees a and b, c sees a and c.

    >>> pieces = [Piece(start=i, stop=i + 1, parent=None if i == 0 else 0) for i in range(3)]
    >>> zeros, values = torch.zeros(1, 1, 3, 1), torch.tensor([1.0, 3.0, 7.0]).view(1, 1, 3, 1)
    >>> tree_attention(nn.Module(), zeros, zeros, values, None, pieces=pieces)[0].flatten().tolist()
    [1.0, 2.0, 4.0]

    Raises:
        ValueError: there are no pieces, or the layer's weights are more than a softmax of products.
    """
    if pieces is None:
        raise ValueError(
            f"the row's pieces do not reach {type(module).__name__}: the model was not called through "
            "train.model.hidden_states, or does not hand on what it does not know"
        )
    for name in _UNSERVED:
        if others.get(name) is not None:
            raise ValueError(f"its attention has {name}, which packed rows are not computed with")
    lengths = [len(piece) for piece in pieces]
    # What attention keeps for its backward pass is then its own: a view would keep the whole row besides.
    copies = any(piece.parent is not None for piece in pieces)
    parts = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
    outputs: list[Tensor] = []
    for number, piece in enumerate(pieces):
        path = piece_path(pieces, number)
        q, k, v = ([part[i] for i in path] for part in parts)
        length = sum(lengths[i] for i in path)
        mask = _band(length, attention_mask, query.device)
        output = _attend(_joined(q, copies), _joined(k, copies), _joined(v, copies), mask, dropout, scaling)
        outputs.append(output[:, :, length - len(piece) :].transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _joined(parts: Sequence[Tensor], copies: bool) -> Tensor:
    return torch.cat(list(parts), dim=2) if copies else parts[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # There, no kernel but the one that holds all weights takes fewer key heads than query heads.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask `[length, length]` of a window that is shorter than the path; None where causal attention does."""
    if window is None or length <= window:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window)


def _window(*_: Any, config: Any = None, local_size: int | None = None, **__: Any) -> int | None:
    """In place of a mask: how far back a layer's tokens see. transformers hands it to `tree_attention` as it is."""
    if getattr(config, "attention_chunk_size", None):
        raise ValueError("its attention is in chunks of fixed places, which packed rows are not computed with")
    return local_size
