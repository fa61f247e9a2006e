"""How does a vLLM server take weights from a trainer over TCP? The part that runs beside its model.

`python -m scripts.serve --takes-weights` names `PolicyTransfer` as vLLM's `worker_extension_cls`: vLLM imports this
module in each worker, which makes the back-end known, and mixes the class's methods into its worker, where
`/collective_rpc` finds them. The steps of an update (`/init_weight_transfer_engine`, `/start_weight_update`,
`/update_weights`, `/finish_weight_update`) are vLLM's own, the same as for NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollouts.engine_adapter import AdapterWeights, write_adapter
from rollouts.engine_vllm_worker import free_head, repack_embeddings
from rollouts.server_command import TCP_BACKEND
from rollouts.weight_transfer_tcp import receive_tensors


@dataclass(kw_only=True)
class TcpInitInfo(WeightTransferInitInfo):
    """Where the trainer hands its weights out. `timeout_s`: how long one read waits, so that a trainer that died
    leaves no server waiting."""

    host: str
    port: int
    token: str
    timeout_s: float


@dataclass(kw_only=True)
class TcpUpdateInfo(WeightTransferUpdateInfo):
    """What comes, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class TcpWeights(WeightTransferEngine[TcpInitInfo, TcpUpdateInfo]):
    """vLLM's side of a sync over TCP: one connection a worker, the tensors' bytes and nothing else on it.

    vLLM puts a layer in place when all its tensors have come, so a layer's weights are held twice, and no more.
    """

    init_info_cls = TcpInitInfo
    update_info_cls = TcpUpdateInfo
    _trainer: TcpInitInfo | None = None
    _expected: frozenset[str] | set[str] = frozenset()

    def init_transfer_engine(self, init_info: TcpInitInfo) -> None:
        self._trainer = init_info

    def start_weight_update(self) -> None:
        # Asked first: while weights come, a tied head is a parameter of its own.
        self._expected = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TcpUpdateInfo) -> None:
        """
        Raises:
            RuntimeError: a parameter of the model got nothing.
            OSError: the trainer does not answer, or stopped in the middle.
        """
        assert self._trainer is not None, "init_weight_transfer_engine comes first"
        model: Any = self.model
        tensors = receive_tensors(asdict(self._trainer), asdict(update_info))
        loaded = model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
        if loaded is not None and self.model_config.quantization is None:
            missing = self._expected - set(loaded)
            if missing:
                raise RuntimeError(f"{len(missing)} parameters got no weights, {min(missing)} is one")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_embeddings(self.model)

    def shutdown(self) -> None:
        self._trainer = None


class PolicyTransfer:
    """Methods added to the vLLM worker, called by name through `/collective_rpc`."""

    vllm_config: Any  # the worker's own
    model_runner: Any
    list_loras: Any
    add_lora: Any
    _other_adapters: set[int] | None = None
    """Those that were there before a trainer sent one."""
    _weight_update_active: bool

    def begin_policy_sync(self) -> dict[str, Any]:
        """What this worker is, for the trainer; and the end of an update that was left halfway.

        vLLM keeps what had come of such an update, and would take the first tensors of the next one for its rest.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        model, config = self.model_runner.get_model(), self.vllm_config
        self._weight_update_active = False
        if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
            finalize_layerwise_reload(model, config.model_config)
        return {
            "backend": config.weight_transfer_config.backend,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "lora_rank": config.lora_config.max_lora_rank if config.lora_config else 0,
        }

    def take_policy_adapter(
        self, trainer: dict[str, Any], info: dict[str, Any], config: dict[str, Any]
    ) -> dict[str, Any]:
        """Receive an adapter and put it into a folder of this machine, from which vLLM loads it: the first one by its
        own address, which gives it a name; those after it here, in its place. (In its place by that address, vLLM 0.32
        would read the folder again in every step.)"""
        from vllm.lora.request import LoRARequest

        adapter = AdapterWeights(tensors=dict(receive_tensors(trainer, info)), config=config)
        path = write_adapter(adapter, Path(gettempdir()) / f"agentgrad-adapter-{os.getpid()}")
        if self.model_runner.device.type == "cpu" and not any("lm_head" in name for name in adapter.tensors):
            free_head(self.model_runner.get_model())
        loaded = set(self.list_loras())
        if self._other_adapters is None:
            self._other_adapters = loaded
        ours = loaded - self._other_adapters
        for number in ours:
            self.add_lora(LoRARequest("policy", number, str(path), load_inplace=True))
        return {"path": str(path), "is_loaded": len(ours) == 1}


def _register() -> None:
    """Make the back-end known where vLLM makes it: in a worker, which has this module from its command line alone."""
    known: Mapping[str, Any] = WeightTransferEngineFactory._registry
    if TCP_BACKEND not in known:
        WeightTransferEngineFactory.register_engine(TCP_BACKEND, TcpWeights)


_register()
