"""How is one token drawn from logits? The order of vLLM's sampler, written out for one position.

grammar → penalties → temperature → min_p → top_k → top_p → draw. The logprob is that of the distribution that all of
them leave, renormalised: what the token was really drawn from. It leaves out the grammar itself (`call_grammar.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from data.types import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this one where less is asked for, 0 apart."""
_NOTHING = float("-inf")


def sample_token(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """Draw one token from `logits` `[vocabulary]`, grammar and penalties in them; returns it and its logprob (nats).

    Temperature 0 takes the likeliest token, with its logprob at temperature 1 and nothing cut.

    Worked example: probabilities 0.5, 0.3, 0.2 and `top_p` 0.6 keep the first two tokens, as 0.625 and 0.375.
    """
    import torch

    logprobs = distribution(logits, params)
    if params.temperature == 0:
        token = int(logprobs.argmax())
    else:
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logprobs `[vocabulary]` (nats) of what temperature and cuts leave of `logits`; of temperature 0, uncut."""
    if params.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / max(params.temperature, LOWEST_TEMPERATURE)
    return keep_top_p(keep_top_k(keep_min_p(logits, params.min_p), params.top_k), params.top_p).log_softmax(-1)


def penalise(logits: Tensor, params: SamplingParams, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Tensor:
    """`logits` `[vocabulary]` after the three penalties.

    The repetition penalty is for tokens of prompt and completion (Keskar et al. 2019, CTRL, section 4.1): positive
    logits are divided by it, negative ones multiplied. The frequency penalty is subtracted for each time that the
    completion has the token, the presence penalty once.

    Worked example: logits 2, -1, 3, prompt [0], completion [1, 1], penalties 2, 0.5 (presence), 0.25 (frequency) give
    2 / 2 = 1, -1 * 2 - 0.5 - 2 * 0.25 = -3, and 3.
    """
    import torch

    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0):
        return logits
    sampled = torch.bincount(torch.tensor(sampled_ids, dtype=torch.long), minlength=len(logits))
    seen = sampled > 0
    seen[list(prompt_ids)] = True
    factor = params.repetition_penalty
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    return logits - params.frequency_penalty * sampled - params.presence_penalty * (sampled > 0)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Set to -inf the tokens whose probability is below `min_p` times the likeliest one's (Nguyen et al. 2024,
    arXiv:2407.01082)."""
    if min_p <= 0:
        return logits
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < min_p * probs.max(), _NOTHING)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Set to -inf all but the `top_k` likeliest tokens (Fan et al. 2018); those that tie with the last one stay."""
    if not 0 < top_k < len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(top_k).values[-1], _NOTHING)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Set to -inf all but the likeliest tokens that hold `top_p` of the probability (Holtzman et al. 2020, nucleus
    sampling). The token that crosses the border stays, so at least one does."""
    if top_p >= 1:
        return logits
    ordered, order = logits.sort()  # least likely first, as in vLLM
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[-1] = False
    return logits.masked_fill(drop.scatter(0, order, drop), _NOTHING)
