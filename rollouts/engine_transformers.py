"""The reference engine: a Hugging Face model sampled with plain torch, for machines without vLLM.

Requests that wait are taken together, up to `max_batch`, and sampled as one left-padded batch until the last of
them is finished; those that arrive meanwhile wait for the next batch. That is simple to read and to trust, and
slower than continuous batching wherever lengths differ. New weights come between two tokens: the batch is computed
anew from its first token, and goes on.

Each request draws from a generator of its own, so its tokens do not depend on who shares its batch. How one token is
drawn is in `token_sampling.py`, how a batch is in `batch_sampling.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from data.call_grammar import CallGrammar, GrammarState
from data.types import Completion, SamplingParams
from rollouts.batch_sampling import Batch, Request
from rollouts.engine import EngineError, EngineLoad, SyncReport
from rollouts.engine_adapter import AdapterWeights, check_adapter, read_adapter, read_adapter_facts, write_adapter
from rollouts.engine_checks import (
    check_context,
    check_no_adapter,
    check_prompt,
    check_scored,
    check_weights_fit,
    read_model_facts,
)
from rollouts.engine_sleep import SleepState
from rollouts.engine_thread import EngineThread, settle, settle_error
from rollouts.weight_transfer import PushedWeights

if TYPE_CHECKING:
    from torch import Tensor


class TransformersEngine:
    """An `Engine`. Building one loads the model.

    dtype: "auto" = float32 on a CPU, bfloat16 on a GPU, whatever the checkpoint has.
    adapter: the folder of a LoRA adapter (PEFT) to sample with; it is kept beside the weights, not merged.

    Raises:
        ValueError: there is no model at `model_path`, the adapter does not fit it, or a setting is out of range.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        max_context_tokens: int | None = None,
        max_batch: int = 32,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: str | None = None,
        adapter: Path | None = None,
        policy: str = "policy",
        policy_version: int = 0,
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        self._model_path = model_path
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
        self._device = target
        self._grammar: CallGrammar | None = None
        self._sleep = SleepState()
        self._adapter: Path | None = None
        if adapter is not None:
            self._put_adapter(adapter)
        self._pushed = PushedWeights()
        self._waiting: list[Request] = []
        self._batch: Batch | None = None
        self._inside = 0  # requests that somebody waits for: counted where they wait
        self._running = 0
        self._thread = EngineThread("transformers", has_work=self._has_work, step=self._step, ended=self._fail_waiting)

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def load(self) -> EngineLoad:
        running = min(self._running, self._inside)
        return EngineLoad(running=running, waiting=self._inside - running, capacity=self._max_batch)

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See `Engine.generate`. Only `params.stop_token_ids` stop it, not the model's own end-of-text id.

        At temperature 0 the logprobs are those of temperature 1.
        """
        import torch

        check_prompt(prompt_ids, params, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        seed = secrets.randbits(48) if params.seed is None else params.seed % (1 << 63)
        request = Request(
            completion_id=completion_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            future=Future(),
            generator=torch.Generator().manual_seed(seed),
        )
        self._thread.post(lambda: self._add(request))
        self._inside += 1
        try:
            return await asyncio.wrap_future(request.future)  # cancelled, the batch sees it and goes on without
        finally:
            self._inside -= 1

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        check_scored(token_ids, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        ids = list(token_ids)
        return await asyncio.wrap_future(self._thread.call(lambda: self._score(ids)))

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> SyncReport:
        """See `Engine.load_weights`."""
        check_no_adapter(self._adapter)
        tensors = check_weights_fit(state_dict, self._facts)
        return await asyncio.wrap_future(self._thread.call(lambda: self._load(tensors, policy_version)))

    async def load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        """See `Engine.load_adapter`."""
        return await asyncio.wrap_future(self._thread.call(lambda: self._load_adapter(adapter, policy_version)))

    async def sleep(self, *, keep_weights: bool = True) -> bool:
        """See `Engine.sleep`. The weights are kept on the CPU in any case, and are still asked for anew without
        `keep_weights`: what runs here shall run on vLLM."""
        inside = self._inside
        return await asyncio.wrap_future(self._thread.call(lambda: self._fall_asleep(keep_weights, inside)))

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await asyncio.wrap_future(self._thread.call(self._wake))

    async def close(self) -> None:
        """End the thread. Requests that still wait get an `EngineError`. Safe to call twice."""
        await asyncio.to_thread(self._thread.stop)

    # Everything below runs on the engine's thread.

    def _has_work(self) -> bool:
        return self._batch is not None or bool(self._waiting)

    def _add(self, request: Request) -> None:
        try:
            self._sleep.check_can_sample()
            if request.params.structural_tag is not None:
                request.grammar = self._start_grammar(request.params)
        except (EngineError, ValueError) as error:
            settle_error(request.future, error)
        else:
            self._waiting.append(request)

    def _start_grammar(self, params: SamplingParams) -> GrammarState:
        from transformers import AutoTokenizer

        if self._grammar is None:
            tokenizer = AutoTokenizer.from_pretrained(self._model_path, local_files_only=True)
            self._grammar = CallGrammar(tokenizer, self._facts.vocab_size)
        assert params.structural_tag is not None
        return self._grammar.start(params.structural_tag, params.stop_token_ids)

    def _score(self, token_ids: Sequence[int]) -> list[float]:
        self._sleep.check_can_sample()
        return score_tokens(self._model, token_ids)

    def _fail_waiting(self, error: EngineError) -> None:
        batch = self._batch.requests if self._batch is not None else []
        for request in [*batch, *self._waiting]:
            settle_error(request.future, error)
        self._waiting.clear()

    def _load(self, tensors: dict[str, Tensor], policy_version: int) -> SyncReport:
        self._sleep.check_can_load()
        # A tied head follows its embedding, so it is rightly "missing" here; the names were checked before.
        self._model.load_state_dict(tensors, strict=False)
        self._sleep.weights_arrived()
        return self._now_at(policy_version, tensors)

    def _load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        self._sleep.check_can_load()
        if isinstance(adapter, Path):
            self._put_adapter(adapter)
            return self._now_at(policy_version, read_adapter(adapter).tensors)
        check_adapter(adapter, self._facts)
        with TemporaryDirectory(prefix="agentgrad-") as folder:
            self._put_adapter(write_adapter(adapter, Path(folder) / "adapter"))
        return self._now_at(policy_version, adapter.tensors)

    def _now_at(self, policy_version: int, tensors: Mapping[str, Tensor]) -> SyncReport:
        """The weights have changed: what was computed with the old ones is forgotten."""
        self.policy_version = policy_version
        running = 0
        if self._batch is not None:
            self._batch.forget()
            running = sum(not request.is_over for request in self._batch.requests)
        changed = self._pushed.count_changed(tensors)
        return SyncReport(tensors=len(tensors), changed=changed, caches_dropped=1, requests_running=running)

    def _put_adapter(self, path: Path) -> None:
        read_adapter_facts(path, self._facts)
        if self._adapter is not None:
            self._model.delete_adapter("adapter")
        self._model.load_adapter(str(path), adapter_name="adapter")
        self._adapter = path

    def _fall_asleep(self, keep_weights: bool, requests: int) -> bool:
        import torch

        if not self._sleep.fall_asleep(keep_weights=keep_weights, requests=requests):
            return False
        self._model.to("cpu")
        if self._device == "cpu":
            return False
        torch.cuda.empty_cache()
        return True

    def _wake(self) -> None:
        if self._sleep.wake():
            self._model.to(self._device)

    def _step(self) -> None:
        if self._batch is None:
            self._batch = Batch(self._waiting[: self._max_batch])
            self._waiting = self._waiting[self._max_batch :]
            self._running = len(self._batch.requests)
        batch = self._batch
        try:
            if not batch.is_over:
                batch.step(self._model, self.policy_version)
        except Exception as error:  # such as no memory left; the model is as it was
            failure = EngineError(f"sampling a batch of {len(batch.requests)} failed: {error}")
            failure.__cause__ = error
            for request in batch.requests:
                settle_error(request.future, failure)
            self._end_batch()
            return
        if batch.is_over:
            self._end_batch()
            for request in batch.requests:
                if not request.future.cancelled():
                    settle(request.future, self._completion(request))

    def _end_batch(self) -> None:
        self._batch, self._running = None, 0

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            completion_id=request.completion_id,
            token_ids=tuple(request.token_ids),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
            policy=self._policy,
            policy_version=tuple(request.versions),
            forced=tuple(request.forced),
        )


def score_tokens(model: Any, token_ids: Sequence[int]) -> list[float]:
    """Logprobs `[n - 1]` (nats, temperature 1) of tokens 1 to n-1 given those before them, in one forward pass."""
    import torch

    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode():
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
