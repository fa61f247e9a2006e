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
    versions: list[int] = field(default_factory=list)
    """`[n]`, of the weights that sampled each token."""

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.token_ids and self.token_ids[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.params.max_tokens else None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.future.cancelled()

    def sample(self, logits: Tensor, version: int) -> None:
        """Draw the next token from `logits` `[vocabulary]`, which weights of this version gave."""
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
        self.versions.append(version)


class Batch:
    """Requests that are sampled together, one token each a step.

    Finished rows stay in the batch and are fed their last token again; nothing of them is kept.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.forget()

    @property
    def is_over(self) -> bool:
        return all(request.is_over for request in self.requests)

    def forget(self) -> None:
        """Compute every row anew in the next step, from its first token: the weights have changed."""
        import torch

        rows = [[*request.prompt_ids, *request.token_ids] for request in self.requests]
        width = max(map(len, rows))
        self._ids = torch.zeros(len(rows), width, dtype=torch.long)
        self._mask = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            self._ids[place, width - len(row) :] = torch.tensor(row)
            self._mask[place, width - len(row) :] = 1
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None

    def step(self, model: Any, version: int) -> None:
        """Sample a token for every request that is not over; `version`: of the model's weights."""
        import torch

        device = model.device
        with torch.inference_mode():
            output = model(
                input_ids=self._ids.to(device),
                attention_mask=self._mask.to(device),
                position_ids=self._positions.to(device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self._cache = output.past_key_values
            logits = output.logits[:, -1].float().cpu()  # [batch, vocabulary]
            for row, request in enumerate(self.requests):
                if not request.is_over:
                    request.sample(logits[row], version)
        last = [[request.token_ids[-1] if request.token_ids else 0] for request in self.requests]
        self._ids = torch.tensor(last)
        self._mask = torch.cat([self._mask, torch.ones(len(last), 1, dtype=torch.long)], dim=1)
        # A row that is over stays where it is: the model may have no position beyond it.
        over = torch.tensor([[request.is_over] for request in self.requests])
        self._positions = self._positions[:, -1:] + (~over).long()
