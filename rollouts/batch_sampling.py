"""How is a batch of requests sampled with a Hugging Face model? Left-padded, one token each a forward pass.

It leaves out how requests arrive and how their results are handed out (`engine_transformers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from data.call_grammar import GrammarState
from data.types import Completion, FinishReason, SamplingParams
from rollouts.token_sampling import penalise, sample_token

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Request:
    """One completion on its way. `token_ids` and `logprobs` `[n]` grow while it is sampled."""

    completion_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    future: Future[Completion]
    generator: torch.Generator
    grammar: GrammarState | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.token_ids and self.token_ids[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.params.max_tokens else None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.future.cancelled()

    def sample(self, logits: Tensor) -> None:
        """Draw the next token from `logits` `[vocabulary]`."""
        if self.grammar is not None:
            allowed = self.grammar.allowed()
            logits = logits.masked_fill(~allowed, float("-inf"))
            if allowed.sum() == 1:
                self.forced.append(len(self.token_ids))
        logits = penalise(logits, self.params, self.prompt_ids, self.token_ids)
        token, logprob = sample_token(logits, self.params, self.generator)
        if self.grammar is not None:
            self.grammar.accept(token)
        self.token_ids.append(token)
        self.logprobs.append(logprob)


def sample_together(model: Any, batch: Sequence[Request]) -> None:
    """Sample every request of the batch to its end, one token each a forward pass.

    Finished rows stay in the batch and are fed their last token again; nothing of them is kept.
    """
    import torch

    width = max(len(request.prompt_ids) for request in batch)
    device = model.device
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, width - len(request.prompt_ids) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = None
    with torch.inference_mode():
        while True:
            output = model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logits = output.logits[:, -1].float().cpu()  # [batch, vocabulary]
            for row, request in enumerate(batch):
                if not request.is_over:
                    request.sample(logits[row])
            if all(request.is_over for request in batch):
                return
            ids = torch.tensor([[request.token_ids[-1] if request.token_ids else 0] for request in batch])
            mask = torch.cat([mask, torch.ones(len(batch), 1, dtype=torch.long)], dim=1)
            # A row that is over stays where it is: the model may have no position beyond it.
            over = torch.tensor([[request.is_over] for request in batch])
            positions = positions[:, -1:] + (~over).long()
