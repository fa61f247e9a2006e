"""How do new weights reach vLLM's model? Sent from here, and put in place by a part that runs beside the model.

vLLM mixes `PolicyWeights` into its worker class (`worker_extension_cls`), so the same call works in this process
and in a child process. Nothing of vLLM is imported before a method runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.engine.llm_engine import LLMEngine


@contextmanager
def standing_still(llm: LLMEngine) -> Iterator[None]:
    """While this lasts nothing is sampled; at its end no cached prefix is left, and requests that run are computed anew
    from their first token. In this process the thread that is here takes the steps; a child process takes its own."""
    from vllm.v1.engine.core_client import SyncMPClient

    core = llm.engine_core
    if isinstance(core, SyncMPClient):
        core.call_utility("pause_scheduler", "keep", False)
    try:
        yield
        if not llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop its cached prefixes")
    finally:
        if isinstance(core, SyncMPClient):
            core.call_utility("resume_scheduler")


def send_policy_weights(llm: LLMEngine, tensors: Mapping[str, Tensor]) -> None:
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


class PolicyWeights:
    """Methods added to the vLLM worker, called by name through `collective_rpc`."""

    model_runner: Any  # the worker's own
    reload_weights: Any  # the worker's own

    def load_policy_weights(self, weights: Mapping[str, Tensor] | str) -> None:
        """Load every tensor, given by Hugging Face name or as the path of a safetensors file.

        The caller has checked names and shapes.
        """
        pairs = _read_tensors(Path(weights)) if isinstance(weights, str) else iter(weights.items())
        self.reload_weights(weights_iterator=pairs)
        repack_embeddings(self.model_runner.get_model())

    def free_policy_head(self) -> None:
        """No adapter of this engine is on the head."""
        free_head(self.model_runner.get_model())


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def free_head(model: Any) -> None:
    """Take vLLM's place for an adapter off the head, where there is none of it.

    On a CPU it counts one row of the head a request, and ends the engine when a prompt is scored beside requests that
    sample (0.32: "einsum(): subscript b has size 2 for operand 1").
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LogitsProcessorWithLoRA):
                setattr(parent, name, child.base_layer)


def repack_embeddings(model: Any) -> None:
    """Rebuild the packed copies that the CPU backend multiplies with, where there are any.

    A reload repacks the layers whose names it was given. A tied head has none (its weight is the embedding's), so
    its packed copy would stay the old one: logprobs off by a nat, and no error.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
