"""The vLLM engine: continuous batching inside this process (or one child process), on a CPU or a GPU.

Every call of vLLM happens on one thread. Requests are handed in through a queue and batched with whatever is
running; results come back as futures. It leaves out several GPUs (tensor parallel) and adapters.

What follows from vLLM, and was tried:

- Only the caller's stop ids stop a completion; the model's own end-of-text id does not, unless it is among them.
- The stop token is in `token_ids`, with its logprob.
- Temperature 0 is greedy; its logprobs are those of temperature 1.
- On a CPU vLLM draws from torch's global generator in every step, seeded requests or not. A trainer in the same
  process that must repeat exactly draws from its own generator, or has the engine `isolated`.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError, EngineLoad
from rollouts.engine_checks import (
    ModelFacts,
    check_context,
    check_prompt,
    check_scored,
    check_weights_fit,
    read_model_facts,
)
from rollouts.engine_thread import EngineThread, settle, settle_error
from rollouts.engine_vllm_start import VllmOptions, start_llm

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VllmParams
    from vllm.v1.engine.llm_engine import LLMEngine

T = TypeVar("T")

SMALL_MODEL = 30_000_000
"""Parameters below which one thread samples faster than two, and is not hurt by others on the same cores."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request inside vLLM: who waits for it, and how its output is read."""

    future: Future[Any]
    read: Callable[[RequestOutput], Any]


class VllmEngine:
    """An `Engine`. Building one blocks until vLLM is ready: about 20 s, most of it imports.

    Raises:
        ValueError: there is no model at `model_path`, vLLM is not installed, or a setting is out of range.
        EngineError: vLLM refused the model.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        max_context_tokens: int | None = None,
        options: VllmOptions | None = None,
        policy: str = "policy",
        policy_version: int = 0,
    ) -> None:
        self._facts = read_model_facts(model_path)
        self._max_context_tokens = check_context(max_context_tokens, self._facts)
        self._capacity = (options or VllmOptions()).max_concurrent
        self._policy = policy
        self.policy_version = policy_version
        self._numbers = count()
        self._pending: dict[str, _Pending] = {}
        self._llm: LLMEngine | None = None
        self._thread = EngineThread("vLLM", has_work=self._has_work, step=self._step, ended=self._fail_pending)
        try:
            self._start(model_path, _choose_threads(options or VllmOptions(), self._facts))
        except BaseException:
            self._thread.stop()
            raise

    def _start(self, model_path: Path, options: VllmOptions) -> None:
        import torch

        threads = torch.get_num_threads()

        def start() -> None:
            if options.cpu_threads is not None:
                torch.set_num_threads(options.cpu_threads)
            self._llm = start_llm(model_path, self._max_context_tokens, options)
            self._llm.set_weight_version(str(self.policy_version))

        self._thread.call(start).result()
        if options.cpu_threads is not None:
            torch.set_num_threads(threads)  # the number is kept per thread, but also as the default of new ones

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def load(self) -> EngineLoad:
        """Scores count as requests too; what is handed in and not yet added is missing for a moment."""
        inside = len(self._pending)
        running = min(inside, self._capacity)
        return EngineLoad(running=running, waiting=inside - running, capacity=self._capacity)

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See `Engine.generate`. Cancelling it takes the request out of the batch."""
        check_prompt(prompt_ids, params, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        return await self._request(prompt_ids, _sampling(params), lambda output: self._read(completion_id, output))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`. Nothing is read from the prefix cache: cached tokens have no logprobs."""
        check_scored(token_ids, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        # The last token is asked for as a candidate of a sampled position, so that a full context fits too.
        return await self._request(token_ids[:-1], _scoring(token_ids[-1]), _read_scores)

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> None:
        """See `Engine.load_weights`. Refused while requests run: their cached keys would mix two policies."""
        tensors = check_weights_fit(state_dict, self._facts)
        await self.run(lambda llm: self._load(llm, tensors, policy_version))

    async def run(self, function: Callable[[LLMEngine], T]) -> T:
        """Run a function of vLLM's own engine on its thread, between two steps: for diagnosis and for tests."""
        return await asyncio.wrap_future(self._thread.call(lambda: function(self._engine())))

    async def close(self) -> None:
        """End vLLM. Requests that still run get an `EngineError`. Safe to call twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._llm is None:
            return
        self._thread.stop()
        self._llm.engine_core.shutdown()
        self._llm = None

    async def _request(self, prompt_ids: Sequence[int], params: VllmParams, read: Callable[[RequestOutput], T]) -> T:
        request_id = str(next(self._numbers))
        future: Future[T] = Future()
        self._thread.post(lambda: self._add(request_id, list(prompt_ids), params, _Pending(future, read)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with suppress(EngineError):  # closed meanwhile: nothing is left to abort
                self._thread.post(lambda: self._abort(request_id))
            raise

    # Everything below runs on the engine's thread.

    def _engine(self) -> LLMEngine:
        if self._llm is None:
            raise EngineError("the vLLM engine is closed")
        return self._llm

    def _has_work(self) -> bool:
        return bool(self._pending)

    def _add(self, request_id: str, prompt_ids: list[int], params: VllmParams, pending: _Pending) -> None:
        from vllm.inputs.engine import tokens_input

        if pending.future.cancelled():
            return
        try:
            self._engine().add_request(request_id, tokens_input(prompt_ids), params)
        except Exception as error:
            settle_error(pending.future, EngineError(f"vLLM refused a request: {error}"))
        else:
            self._pending[request_id] = pending

    def _abort(self, request_id: str) -> None:
        if self._pending.pop(request_id, None) is not None:
            self._engine().abort_request([request_id])

    def _step(self) -> None:
        for output in self._engine().step():
            pending = self._pending.pop(output.request_id)
            try:
                settle(pending.future, pending.read(cast("RequestOutput", output)))
            except EngineError as error:
                settle_error(pending.future, error)

    def _fail_pending(self, error: EngineError) -> None:
        for pending in self._pending.values():
            settle_error(pending.future, error)
        self._pending.clear()

    def _load(self, llm: LLMEngine, tensors: dict[str, Tensor], policy_version: int) -> None:
        if self._pending:
            raise EngineError(f"load_weights while {len(self._pending)} requests run: wait for them, or cancel them")
        # Before the weights, so that a refusal leaves the engine as it was. Nothing can be cached in between.
        if not llm.reset_prefix_cache():
            raise EngineError("vLLM did not drop its cached prefixes, the weights were left as they are")
        try:
            _send(llm, tensors)
            llm.set_weight_version(str(policy_version))
        except Exception as error:
            broken = EngineError(f"loading weights stopped halfway ({error}); start a new engine")
            self._thread.end(broken)
            raise broken from error
        self.policy_version = policy_version

    def _read(self, completion_id: str, output: RequestOutput) -> Completion:
        sampled = output.outputs[0]
        if sampled.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended completion {completion_id} with {sampled.finish_reason!r}")
        versions: list[int] = []
        for span in sampled.weight_versions or ():
            versions += [int(span.version)] * (span.end - span.start)
        return Completion(
            completion_id=completion_id,
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(_first_logprobs(sampled.logprobs)),
            finish_reason=sampled.finish_reason,
            policy=self._policy,
            policy_version=tuple(versions),
        )


def _choose_threads(options: VllmOptions, facts: ModelFacts) -> VllmOptions:
    if options.cpu_threads is not None or facts.num_parameters >= SMALL_MODEL:
        return options
    return replace(options, cpu_threads=1)


def _sampling(params: SamplingParams) -> VllmParams:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    # vLLM reads -1 as "no seed". Without one, vLLM would draw from the trainer's global generator.
    seed = secrets.randbits(48) if params.seed is None else params.seed % (1 << 63)
    return VllmParams(
        temperature=params.temperature,
        top_p=params.top_p,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_token_ids),
        seed=seed,
        ignore_eos=True,
        logprobs=0,  # of the sampled token and no other
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _scoring(last_token: int) -> VllmParams:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=1.0,
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        prompt_logprobs=0,
        logprob_token_ids=[last_token],
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _first_logprobs(logprobs: Any) -> list[float]:
    """Of each position the first logprob, which is the sampled (or prompt) token's; a position without one is
    skipped (the first token of a prompt)."""
    spans = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [logprobs.logprobs[start] for start, end in spans if end > start]


def _read_scores(output: RequestOutput) -> list[float]:
    last: Any = output.outputs[0].logprobs  # of the sampled token, then of the one asked for
    return [*_first_logprobs(output.prompt_logprobs), last.logprobs[-1]]


def _send(llm: LLMEngine, tensors: dict[str, Tensor]) -> None:
    """Hand the tensors over: as they are inside this process, as a file in memory to a child process."""
    from vllm.v1.engine.core_client import InprocClient

    if isinstance(llm.engine_core, InprocClient):
        llm.collective_rpc("load_policy_weights", args=(tensors,))
        return
    from safetensors.torch import save_file

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="agentgrad-", dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / "policy.safetensors"
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
        llm.collective_rpc("load_policy_weights", args=(str(path),))
