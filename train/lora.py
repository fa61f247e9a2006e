"""LoRA: small trainable matrices beside frozen ones, and the full weights that the two add up to.

The adapters are put into the model in place, so every other part sees an ordinary model. Engines and checkpoints get
full weights under the ordinary names; the trainer's own tensors are never merged, so they do not drift.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from train.config import LoraSettings
from train.model import load_model

_ADAPTER = "default"


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
def full_state_dict(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name, adapters merged into copies; the model itself is not touched."""
    layers: Mapping[str, LoraLayer] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    if not layers:
        return model.state_dict()
    full: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer_name, _, rest = name.partition(".base_layer.")
        if layer_name in layers and rest == "weight":
            merged: Tensor = tensor + layers[layer_name].get_delta_weight(_ADAPTER)  # type: ignore[operator]
            full[f"{layer_name}.weight"] = merged.to(tensor.dtype)
        elif layer_name in layers and rest:
            full[f"{layer_name}.{rest}"] = tensor
        elif ".lora_" not in name:
            full[name] = tensor
    return full


def adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' own tensors; empty without LoRA."""
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
