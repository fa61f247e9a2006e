"""LoRA: small trainable matrices beside frozen ones, and the full weights that the two add up to.

The adapters are put into the model in place, so every other part sees an ordinary model. Engines and checkpoints get
full weights under the ordinary names; the trainer's own tensors are never merged, so they do not drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollouts.engine_adapter import AdapterWeights
from train.config import LoraSettings
from train.model import load_model

_ADAPTER = "default"
_AROUND = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""What torch calls a module inside a wrapper of its own: checkpointing, compiling, sharding."""


def add_lora(model: PreTrainedModel, settings: LoraSettings, *, seed: int) -> PreTrainedModel:
    """Put adapters beside all linear layers but the head, and freeze everything else (Hu et al. 2021,
    arXiv:2106.09685). A rank of 0 leaves the model as it is. The adapters start from `seed`, for every process of a run
    must have the same ones.

    Raises:
        ValueError: the model has no linear layers (GPT-2 has layers of a kind of its own).
    """
    if settings.rank == 0:
        return model
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
    ]
    if not targets:
        raise ValueError(
            f"lora: {type(model).__name__} has no nn.Linear layers to put adapters beside; "
            "set lora.rank to 0 to train all weights"
        )
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):  # adapters are made on the CPU, and moved
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft makes adapters in the frozen weights' type
            parameter.data = parameter.data.float()
    return model


def load_trained(path: str, *, dtype: str, lora: LoraSettings, device: torch.device, seed: int) -> PreTrainedModel:
    """The model of a folder, ready to be trained; errors as `load_model` and `add_lora`.

    What the optimizer changes is float32, since AdamW's small steps would be rounded away in bfloat16. Weights that are
    frozen beside adapters are kept in `dtype`.
    """
    return add_lora(load_model(path, dtype=dtype if lora.rank else "float32", device=device), lora, seed=seed)


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name, adapters merged into copies; the model itself is not touched.

    It takes the model with all that may be around it and in it: PEFT's wrapper, its `base_layer` and `modules_to_save`,
    checkpointing, compiling, `DistributedDataParallel`. What has no such name afterwards keeps the one it has, and an
    engine refuses it.

    Raises:
        ValueError: an adapter is more than low-rank matrices (DoRA, a bias of its own), or two tensors end with one
            name.
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    full: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        found = _full_weight(plain_name(name), tensor, modules)
        if found is None:
            continue
        if found[0] in full:
            raise ValueError(f"two tensors of the model are its {found[0]}, {name} is one: which is to be synced?")
        full[found[0]] = found[1]
    return full


def plain_name(name: str) -> str:
    """A tensor's or a module's name without what is only around it.

    >>> plain_name("module.base_model.model.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    parts = [part for part in name.split(".") if part not in _AROUND]
    if parts[:1] == ["module"]:
        parts = parts[1:]
    return ".".join(parts[2:] if parts[:2] == ["base_model", "model"] else parts)


def _full_weight(name: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> tuple[str, Tensor] | None:
    """The Hugging Face name and the value of one tensor; None where it is part of another, or not in use."""
    owner, _, rest = name.partition(".base_layer.")
    if rest and isinstance(layer := modules.get(owner), LoraLayer):
        return f"{owner}.{rest}", _merged(owner, layer, tensor) if rest == "weight" else tensor
    owner, _, rest = name.partition(".modules_to_save.")
    if rest:
        adapter, _, rest = rest.partition(".")
        return (f"{owner}.{rest}", tensor) if adapter in _active(modules[owner]) else None
    owner, _, rest = name.partition(".original_module.")
    if rest:
        copies: Any = getattr(modules[owner], "modules_to_save", {})
        return None if any(adapter in copies for adapter in _active(modules[owner])) else (f"{owner}.{rest}", tensor)
    owner, _, rest = name.partition(".lora_")
    if rest and isinstance(modules.get(owner), LoraLayer):
        return None
    return name, tensor


def _merged(name: str, layer: LoraLayer, weight: Tensor) -> Tensor:
    if layer.merged:
        return weight
    for adapter in layer.active_adapters:
        if adapter in layer.lora_variant or layer.lora_bias.get(adapter):
            raise ValueError(f"lora: the adapter {adapter!r} of {name} is more than low-rank matrices; use plain LoRA")
        if adapter in layer.scaling:
            weight = (weight + layer.get_delta_weight(adapter)).to(weight.dtype)  # type: ignore[operator]
    return weight


def _active(module: Any) -> list[str]:
    """The adapters in use, of PEFT's wrapper of a whole module."""
    active = module.active_adapters
    return [active] if isinstance(active, str) else list(active)


@torch.no_grad()
def adapter_weights(model: nn.Module) -> AdapterWeights:
    """The adapter alone, as PEFT would save it, for engines that sample with it beside the frozen weights.

    Raises:
        ValueError: the model has no adapters, trains more than them, or scales them in different ways.
    """
    layers = {plain_name(name): layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    tensors: dict[str, Tensor] = {}
    scales: set[tuple[int, float]] = set()
    for name, layer in layers.items():
        for adapter in layer.active_adapters:
            for matrix, modules in (("A", layer.lora_A), ("B", layer.lora_B)):
                if adapter in modules:
                    tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = modules[adapter].weight  # type: ignore[assignment]
                    scales.add((layer.r[adapter], layer.scaling[adapter]))
    others = [name for name, parameter in model.named_parameters() if parameter.requires_grad and ".lora_" not in name]
    if others or any(layer.lora_variant for layer in layers.values()):
        raise ValueError(f"lora: {(others or list(layers))[0]} is more than an adapter; set lora.sync to merged")
    if len(scales) != 1:
        raise ValueError(f"lora: an adapter has one rank and one scale, this model has {scales or 'no adapters'}")
    ((rank, scale),) = scales
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "bias": "none",
    }
    return AdapterWeights(tensors=tensors, config=config)


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' own tensors; empty without LoRA."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
