"""How does the embedded model begin, so that it copies after minutes on a CPU?

Copying needs two heads that work together, and a model finds them late: a head that writes into each place what
stood one place before it, and an induction head that looks for where the present token stood before and takes
what came next (https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads/). From random
weights not one probe was copied after a million tokens (one run, with Muon), a third of the whole training; so the
weights start with a rough pair. Everything is trained afterwards. Leaves out: the training (`make_base_model`).

The residual stream of 128 is shared out: 0-63 this token (as +-1 codes), 64-126 the token before, 127 a constant.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

HEAD_DIM, HEADS, CODE, CONSTANT = 32, 4, 64, 127
SCALE = 0.05
CONSTANT_SIZE = 4.0  # in units of a code's entries
# The size of a normalised entry in layer 0, where 64 code entries and the constant are all that is not zero.
NORMED = math.sqrt(128 / (CODE + CONSTANT_SIZE**2))


@torch.no_grad()
def start_with_induction(model: LlamaForCausalLM) -> None:
    """Overwrite the embeddings and the attention of layers 0 and 1 in place; the rest stays random."""
    codes = torch.zeros_like(model.model.embed_tokens.weight)
    codes[:, :CODE] = torch.randint(0, 2, (codes.shape[0], CODE)) * 2.0 - 1.0
    codes[:, CONSTANT] = CONSTANT_SIZE
    model.model.embed_tokens.weight.copy_(codes * SCALE)
    model.model.norm.weight.fill_(2.0)  # surer predictions
    layers: Any = model.model.layers
    config: Any = model.config
    first, second = layers[0].self_attn, layers[1].self_attn
    theta: float = config.rope_parameters["rope_theta"]
    for head in (0, 1):
        _previous_token_head(first, head, theta)
    for head in range(HEADS):
        _induction_head(second, head)


def _previous_token_head(attention: LlamaAttention, head: int, theta: float) -> None:
    """Queries and keys are constants, a rotation of one place apart: the score is highest one place back."""
    base, half = head * HEAD_DIM, HEAD_DIM // 2
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
        weight[base : base + HEAD_DIM] = 0.0
    size = 8.0 / (CONSTANT_SIZE * NORMED)
    for pair in range(half // 2):  # the slower pairs hardly tell one place from the next
        angle = theta ** (-pair / half)
        attention.k_proj.weight[base + pair, CONSTANT] = size
        attention.q_proj.weight[base + pair, CONSTANT] = size * math.cos(angle)
        attention.q_proj.weight[base + half + pair, CONSTANT] = -size * math.sin(angle)
    # Half of the token's code goes where the code of the token before is kept; the constant stays free.
    attention.o_proj.weight[:, base : base + HEAD_DIM] = 0.0
    through = math.sqrt(SCALE / NORMED)
    for index in range(HEAD_DIM):
        source = head * HEAD_DIM + index
        if CODE + source != CONSTANT:
            attention.v_proj.weight[base + index, source] = through
            attention.o_proj.weight[CODE + source, base + index] = through


def _induction_head(attention: LlamaAttention, head: int) -> None:
    """Compares a quarter of this token's code with the codes before each place, and adds half a code of the best.

    Only the slow half of the rotary pairs compares, so that distance does not matter.
    """
    base, half, quarter = head * HEAD_DIM, HEAD_DIM // 2, CODE // HEADS
    slow = [*range(half // 2, half), *range(half + half // 2, HEAD_DIM)]
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
        weight[base : base + HEAD_DIM] = 0.0
    attention.o_proj.weight[:, base : base + HEAD_DIM] = 0.0
    for index, row in enumerate(slow):
        attention.q_proj.weight[base + row, head * quarter + index] = 2.3
        attention.k_proj.weight[base + row, CODE + head * quarter + index] = 2.3
    through = math.sqrt(8 * SCALE)
    for index in range(HEAD_DIM):
        attention.v_proj.weight[base + index, (head % 2) * HEAD_DIM + index] = through
        attention.o_proj.weight[(head % 2) * HEAD_DIM + index, base + index] = through
