"""The reference engine: a Hugging Face model sampled with plain torch, for machines without vLLM.

Requests that wait are taken together, up to `max_batch`, and sampled as one left-padded batch until the last of
them is finished; those that arrive meanwhile wait for the next batch. That is simple to read and to trust, and
slower than continuous batching wherever lengths differ.

Each request draws from a generator of its own, so its tokens do not depend on who shares its batch.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data.types import Completion, FinishReason, SamplingParams
from rollouts.engine import EngineError, EngineLoad
from rollouts.engine_checks import check_context, check_prompt, check_scored, check_weights_fit, read_model_facts
from rollouts.engine_thread import EngineThread, settle, settle_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class _Request:
    """One completion on its way. `token_ids` and `logprobs` `[n]` grow while it is sampled."""

    completion_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    future: Future[Completion]
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.token_ids and self.token_ids[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.params.max_tokens else None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.future.cancelled()


class TransformersEngine:
    """An `Engine`. Building one loads the model.

    dtype: "auto" = float32 on a CPU, bfloat16 on a GPU, whatever the checkpoint has.

    Raises:
        ValueError: there is no model at `model_path`, or a setting is out of range.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        max_context_tokens: int | None = None,
        max_batch: int = 32,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: str | None = None,
        policy: str = "policy",
        policy_version: int = 0,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        self._facts = read_model_facts(model_path)
        self._max_context_tokens = check_context(max_context_tokens, self._facts)
        self._max_batch = max_batch
        self._policy = policy
        self.policy_version = policy_version
        target = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if dtype == "auto":
            dtype = "float32" if target == "cpu" else "bfloat16"
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._model = model.to(target).eval()
        self._waiting: list[_Request] = []
        self._running = 0
        self._thread = EngineThread(
            "transformers", has_work=self._has_work, step=self._sample_batch, ended=self._fail_waiting
        )

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=self._running, waiting=len(self._waiting), capacity=self._max_batch)

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See `Engine.generate`. Only `params.stop_token_ids` stop it, not the model's own end-of-text id.

        At temperature 0 the logprobs are those of temperature 1.
        """
        import torch

        check_prompt(prompt_ids, params, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        seed = secrets.randbits(48) if params.seed is None else params.seed % (1 << 63)
        request = _Request(
            completion_id=completion_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            future=Future(),
            generator=torch.Generator().manual_seed(seed),
        )
        self._thread.post(lambda: self._waiting.append(request))
        return await asyncio.wrap_future(request.future)  # cancelled, the batch sees it and goes on without

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        check_scored(token_ids, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        ids = list(token_ids)
        return await asyncio.wrap_future(self._thread.call(lambda: score_tokens(self._model, ids)))

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> None:
        """See `Engine.load_weights`. Requests that wait are sampled afterwards, with the new weights."""
        tensors = check_weights_fit(state_dict, self._facts)
        await asyncio.wrap_future(self._thread.call(lambda: self._load(tensors, policy_version)))

    async def close(self) -> None:
        """End the thread. Requests that still wait get an `EngineError`. Safe to call twice."""
        await asyncio.to_thread(self._thread.stop)

    # Everything below runs on the engine's thread.

    def _has_work(self) -> bool:
        return bool(self._waiting)

    def _fail_waiting(self, error: EngineError) -> None:
        for request in self._waiting:
            settle_error(request.future, error)
        self._waiting.clear()

    def _load(self, tensors: dict[str, Tensor], policy_version: int) -> None:
        # A tied head follows its embedding, so it is rightly "missing" here; the names were checked before.
        self._model.load_state_dict(tensors, strict=False)
        self.policy_version = policy_version

    def _sample_batch(self) -> None:
        batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
        self._running = len(batch)
        try:
            sample_together(self._model, batch)
        except Exception as error:  # such as no memory left; the model is as it was
            failure = EngineError(f"sampling a batch of {len(batch)} failed: {error}")
            failure.__cause__ = error
            for request in batch:
                settle_error(request.future, failure)
            return
        finally:
            self._running = 0
        for request in batch:
            if not request.future.cancelled():
                settle(request.future, self._completion(request))

    def _completion(self, request: _Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            completion_id=request.completion_id,
            token_ids=tuple(request.token_ids),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
            policy=self._policy,
            policy_version=(self.policy_version,) * len(request.token_ids),  # no load can come between two tokens
        )


def sample_together(model: Any, batch: Sequence[_Request]) -> None:
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
                    token, logprob = sample_token(logits[row], request.params, request.generator)
                    request.token_ids.append(token)
                    request.logprobs.append(logprob)
            if all(request.is_over for request in batch):
                return
            ids = torch.tensor([[request.token_ids[-1] if request.token_ids else 0] for request in batch])
            mask = torch.cat([mask, torch.ones(len(batch), 1, dtype=torch.long)], dim=1)
            # A row that is over stays where it is: the model may have no position beyond it.
            over = torch.tensor([[request.is_over] for request in batch])
            positions = positions[:, -1:] + (~over).long()


def sample_token(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[int, float]:
    """Draw one token from `logits` `[vocabulary]`; returns it and its logprob (nats) under what it was drawn from.

    Worked example: probabilities 0.5, 0.3, 0.2 and `top_p` 0.6 keep the first two tokens, as 0.625 and 0.375.
    """
    import torch

    if params.temperature == 0:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token])
    logprobs = keep_top_p(logits / params.temperature, params.top_p).log_softmax(-1)
    token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Set to -inf all but the likeliest tokens that hold `top_p` of the probability (Holtzman et al. 2020, nucleus
    sampling). The token that crosses the border stays, so at least one does."""
    if top_p >= 1:
        return logits
    ordered, order = logits.sort()  # least likely first, as in vLLM
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[-1] = False
    return logits.masked_fill(drop.scatter(0, order, drop), float("-inf"))


def score_tokens(model: Any, token_ids: Sequence[int]) -> list[float]:
    """Logprobs `[n - 1]` (nats, temperature 1) of tokens 1 to n-1 given those before them, in one forward pass."""
    import torch

    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode():
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
