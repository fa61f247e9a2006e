"""The vLLM engine: continuous batching inside this process (or one child process), on a CPU or a GPU.

Every call of vLLM happens on one thread. Requests are handed in through a queue and batched with whatever is
running; results come back as futures. It leaves out several GPUs (tensor parallel).

What follows from vLLM, and was tried:

- Only the caller's stop ids stop a completion; the model's own end-of-text id does not, unless it is among them.
- The stop token is in `token_ids`, with its logprob.
- Temperature 0 is greedy; its logprobs are those of temperature 1, without cuts. Penalties and grammar are in them.
- On a CPU vLLM draws from torch's global generator in every step, seeded requests or not. A trainer in the same
  process that must repeat exactly draws from its own generator, or has the engine `isolated`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar, cast

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError, EngineLoad, SyncReport
from rollouts.engine_adapter import (
    AdapterWeights,
    check_adapter,
    lora_room,
    read_adapter,
    read_adapter_facts,
    write_adapter,
)
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
from rollouts.engine_vllm_requests import Pending, read_completion, read_scores, refusal, sampling, scoring
from rollouts.engine_vllm_start import (
    VllmOptions,
    choose_threads,
    frees_memory,
    start_llm,
    waiting_counter,
)
from rollouts.engine_vllm_worker import send_policy_weights, standing_still
from rollouts.weight_transfer import PushedWeights

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VllmParams
    from vllm.v1.engine.llm_engine import LLMEngine

T = TypeVar("T")


class VllmEngine:
    """An `Engine`. Building one blocks until vLLM is ready: about 20 s, most of it imports.

    adapter: the folder of a LoRA adapter (PEFT) to sample with. Later ones may have its rank or what vLLM rounds it up
        to, and come by `load_adapter`; `load_weights` is then refused, because they would be under it.

    Raises:
        ValueError: there is no model at `model_path`, the adapter does not fit it, vLLM is not installed, or a setting
            is out of range.
        EngineError: vLLM refused the model.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        max_context_tokens: int | None = None,
        options: VllmOptions | None = None,
        adapter: Path | None = None,
        policy: str = "policy",
        policy_version: int = 0,
    ) -> None:
        self._facts = read_model_facts(model_path)
        self._max_context_tokens = check_context(max_context_tokens, self._facts)
        self._options = choose_threads(options or VllmOptions(), self._facts)
        self._first_adapter = None if adapter is None else read_adapter_facts(adapter, self._facts)
        rank = max(self._options.adapter_rank, 0 if self._first_adapter is None else self._first_adapter.rank)
        self._room = lora_room(rank) if rank else 0
        self._policy = policy
        self.policy_version = policy_version
        self._numbers = count()
        self._pending: dict[str, Pending] = {}
        self._inside = 0  # requests that somebody waits for: counted where they wait
        self._left_waiting = 0  # of them, those that vLLM had no room for in its last step
        self._count_waiting: Callable[[], int] = lambda: 0
        self._lora: LoRARequest | None = None
        self._sleep = SleepState()
        self._pushed = PushedWeights()
        self._llm: LLMEngine | None = None
        self._thread = EngineThread("vLLM", has_work=self._has_work, step=self._step, ended=self._fail_pending)
        try:
            self._start(model_path)
        except BaseException:
            self._thread.stop()
            raise

    def _start(self, model_path: Path) -> None:
        import torch

        threads = torch.get_num_threads()

        def start() -> None:
            if self._options.cpu_threads is not None:
                torch.set_num_threads(self._options.cpu_threads)
            llm = start_llm(model_path, self._max_context_tokens, self._options, lora_rank=self._room)
            self._llm = llm
            self._count_waiting = waiting_counter(llm)
            if self._first_adapter is not None:
                self._load_adapter(llm, self._first_adapter.path, self.policy_version)
            llm.set_weight_version(str(self.policy_version))

        self._thread.call(start).result()
        if self._options.cpu_threads is not None:
            torch.set_num_threads(threads)  # the number is kept per thread, but also as the default of new ones

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def load(self) -> EngineLoad:
        """Waiting are those that vLLM left outside its last step, for want of a place or of cache memory, and those
        beyond the capacity. In a child process its cache is not seen. Scores count as requests too."""
        inside, capacity = self._inside, self._options.max_concurrent
        waiting = min(inside, max(self._left_waiting, inside - capacity))
        return EngineLoad(running=inside - waiting, waiting=waiting, capacity=capacity)

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See `Engine.generate`. Cancelling it takes the request out of the batch."""
        check_prompt(prompt_ids, params, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        if params.structural_tag is not None and not self._options.constrain_calls:
            raise ValueError("a structural tag needs an engine with VllmOptions(constrain_calls=True)")

        def read(output: RequestOutput) -> Completion:
            return read_completion(output, completion_id=completion_id, policy=self._policy)

        return await self._request(prompt_ids, sampling(params), read)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`. Nothing is read from the prefix cache: cached tokens have no logprobs."""
        check_scored(token_ids, max_context_tokens=self._max_context_tokens, vocab_size=self._facts.vocab_size)
        # The last token is asked for as a candidate of a sampled position, so that a full context fits too.
        return await self._request(token_ids[:-1], scoring(token_ids[-1]), read_scores)

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> SyncReport:
        """See `Engine.load_weights`."""
        check_no_adapter(None if self._lora is None else Path(self._lora.lora_path))
        tensors = check_weights_fit(state_dict, self._facts)
        return await self.run(lambda llm: self._load(llm, tensors, policy_version))

    async def load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        """See `Engine.load_adapter`. Its rank must be within `VllmOptions.adapter_rank`, or that of the first one."""
        if not self._room:
            raise EngineError("load_adapter: the engine was started without an adapter, and vLLM has no room for one")
        rank = (
            read_adapter_facts(adapter, self._facts).rank
            if isinstance(adapter, Path)
            else check_adapter(adapter, self._facts)
        )
        if rank > self._room:
            raise ValueError(
                f"adapter {_name(adapter)}: rank {rank}, the engine was started with room for {self._room}"
            )
        return await self.run(lambda llm: self._load_adapter(llm, adapter, policy_version))

    async def sleep(self, *, keep_weights: bool = True) -> bool:
        """See `Engine.sleep`. On a GPU it needs `VllmOptions(can_sleep=True)`; with an adapter, weights are kept.

        Where several processes train, process 0 owns the engine: its GPU alone holds one.
        """
        inside = self._inside
        return await self.run(lambda llm: self._fall_asleep(llm, keep_weights, inside))

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self.run(self._wake)

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
        self._thread.post(lambda: self._add(request_id, list(prompt_ids), params, Pending(future, read)))
        self._inside += 1
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with suppress(EngineError):  # closed meanwhile: nothing is left to abort
                self._thread.post(lambda: self._abort(request_id))
            raise
        finally:
            self._inside -= 1

    # Everything below runs on the engine's thread.

    def _engine(self) -> LLMEngine:
        if self._llm is None:
            raise EngineError("the vLLM engine is closed")
        return self._llm

    def _has_work(self) -> bool:
        return bool(self._pending)

    def _add(self, request_id: str, prompt_ids: list[int], params: VllmParams, pending: Pending) -> None:
        from vllm.inputs.engine import tokens_input

        if pending.future.cancelled():
            return
        try:
            self._sleep.check_can_sample()
            self._engine().add_request(request_id, tokens_input(prompt_ids), params, lora_request=self._lora)
        except EngineError as error:
            settle_error(pending.future, error)
        except Exception as error:
            settle_error(pending.future, refusal(error))
        else:
            self._pending[request_id] = pending

    def _abort(self, request_id: str) -> None:
        if self._pending.pop(request_id, None) is not None:
            self._engine().abort_request([request_id])

    def _step(self) -> None:
        for output in self._engine().step():
            pending = self._pending.pop(output.request_id)
            try:
                result = pending.read(cast("RequestOutput", output))
            except Exception as error:  # such as an output without versions: its caller must not wait for ever
                failure = EngineError(f"what vLLM sampled cannot be read: {error}")
                settle_error(pending.future, error if isinstance(error, EngineError) else failure)
            else:
                settle(pending.future, result)
        self._left_waiting = self._count_waiting()

    def _fail_pending(self, error: EngineError) -> None:
        for pending in self._pending.values():
            settle_error(pending.future, error)
        self._pending.clear()

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """An engine in which this stopped halfway is not used any more."""
        try:
            yield
        except Exception as error:
            broken = EngineError(f"{what} stopped halfway ({' '.join(str(error).split())}); start a new engine")
            self._thread.end(broken)
            raise broken from error

    def _load(self, llm: LLMEngine, tensors: dict[str, Tensor], policy_version: int) -> SyncReport:
        self._sleep.check_can_load()
        with self._whole("loading weights"), standing_still(llm):
            send_policy_weights(llm, tensors)
            llm.set_weight_version(str(policy_version))
        self._sleep.weights_arrived()
        self.policy_version = policy_version
        return self._report(tensors)

    def _load_adapter(self, llm: LLMEngine, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        from vllm.lora.request import LoRARequest

        self._sleep.check_can_load()
        if self._lora is None and self._pending:
            raise EngineError(f"load_adapter: {len(self._pending)} requests run without an adapter: wait for them")
        with TemporaryDirectory(prefix="agentgrad-") as folder, standing_still(llm):
            path = adapter if isinstance(adapter, Path) else write_adapter(adapter, Path(folder) / "adapter")
            try:
                # In the place of the one before, by whose number the requests that run know it.
                llm.add_lora(LoRARequest("adapter", 1, str(path), load_inplace=True))
            except Exception as error:
                raise EngineError(f"vLLM refused adapter {_name(adapter)}: {' '.join(str(error).split())}") from error
            llm.set_weight_version(str(policy_version))
            tensors = (read_adapter(path) if isinstance(adapter, Path) else adapter).tensors
            if llm.vllm_config.device_config.device_type == "cpu" and not any("lm_head" in name for name in tensors):
                llm.collective_rpc("free_policy_head")
        self._lora = LoRARequest("adapter", 1, str(path))
        self.policy_version = policy_version
        return self._report(tensors)

    def _report(self, tensors: Mapping[str, Tensor]) -> SyncReport:
        return SyncReport(
            tensors=len(tensors),
            changed=self._pushed.count_changed(tensors),
            caches_dropped=1,
            requests_running=len(self._pending),
        )

    def _fall_asleep(self, llm: LLMEngine, keep_weights: bool, requests: int) -> bool:
        frees = frees_memory(llm)
        if self._lora is not None and not keep_weights:
            raise EngineError("sleep: an engine with an adapter keeps its weights, for load_weights cannot bring them")
        if not self._sleep.fall_asleep(keep_weights=keep_weights, requests=requests) or not frees:
            return False
        with self._whole("falling asleep"):
            llm.sleep(level=1 if keep_weights else 2)
        return True

    def _wake(self, llm: LLMEngine) -> None:
        if self._sleep.wake() and frees_memory(llm):
            with self._whole("waking"):
                llm.wake_up()


def _name(adapter: Path | AdapterWeights) -> str:
    return str(adapter) if isinstance(adapter, Path) else "of the trainer"
