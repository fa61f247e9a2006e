"""Does a LoRA adapter fit the model? Asked of its folder (PEFT's layout), or of its tensors, before an engine reads it.

Engines refuse what does not fit in many words or not at all: a tensor of a layer that they do not adapt may be passed
over, and then they sample from another model than the one that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.engine_checks import ModelFacts, tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "base_model.model."
_OTHER_METHODS = (
    "use_dora", "use_qalora", "use_bdlora", "kasa_config", "lora_bias", "layer_replication", "alora_invocation_tokens",
)  # fmt: skip
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What an adapter's folder says without loading it. rank: the largest of its layers."""

    path: Path
    rank: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """An adapter in memory, as a trainer has it.

    tensors: under PEFT's names, `base_model.model.LAYER.lora_A.weight` `[rank, in]` and `lora_B` `[out, rank]`.
    config: what `adapter_config.json` says.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


def check_adapter(adapter: AdapterWeights, model: ModelFacts) -> int:
    """Its rank; raises `ValueError` as `read_adapter_facts` does."""
    if reason := _unsupported(adapter.config):
        raise ValueError(f"adapter: {reason}; sync merged weights instead")
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
    if not shapes:
        raise ValueError("adapter: it has no tensors; was the model trained without adapters?")
    return max(_ranks("of the trainer", shapes, model).values())


def read_adapter(path: Path) -> AdapterWeights:
    """The adapter of a folder, whole.

    Raises:
        ValueError: there is none.
    """
    from safetensors.torch import load_file

    file = path / "adapter_model.safetensors"
    config = _read_config(path)
    if not file.is_file():
        raise ValueError(f"adapter {path}: no adapter_model.safetensors; write it with PEFT's save_pretrained")
    return AdapterWeights(tensors=load_file(file), config=config)


def write_adapter(adapter: AdapterWeights, folder: Path) -> Path:
    """Write an adapter as PEFT does; a folder that is there is written over."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(adapter.config)), encoding="utf-8")
    return folder


def read_adapter_facts(path: Path, model: ModelFacts) -> AdapterFacts:
    """Read `adapter_config.json` and the header of `adapter_model.safetensors`.

    Raises:
        ValueError: a file is missing, the adapter is more than low-rank matrices beside linear layers, or a layer is
            not the model's or has another shape there.
    """
    config = _read_config(path)
    if reason := _unsupported(config):
        raise ValueError(f"adapter {path}: {reason}; merge it into a model folder instead")
    shapes = tensor_shapes(path, "adapter_model.safetensors")
    if not shapes:
        raise ValueError(f"adapter {path}: no adapter_model.safetensors; write it with PEFT's save_pretrained")
    ranks = _ranks(path, shapes, model)
    return AdapterFacts(path=path, rank=max(ranks.values()), layers=tuple(sorted(ranks)))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "adapter_config.json"
    if not file.is_file():
        raise ValueError(f"adapter {path}: no adapter_config.json; expected a folder that PEFT's save_pretrained wrote")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"adapter {path}: adapter_config.json is no JSON ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ValueError(f"adapter {path}: peft_type is {kind!r}, and must be 'LORA'")
    return config


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """What makes it more than low-rank matrices beside frozen layers, in words."""
    for name in _OTHER_METHODS:
        if config.get(name):
            return f"{name} = {config[name]!r} is not supported"
    for name in ("modules_to_save", "target_parameters", "trainable_token_indices"):
        if config.get(name):
            return f"{name} = {config[name]!r}: only linear layers can be adapted"
    if config.get("bias", "none") != "none":
        return f"bias = {config['bias']!r} is not supported"
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        return f"init_lora_weights = {config['init_lora_weights']!r} changes the model's own weights"
    return None


def _ranks(path: Path | str, shapes: Mapping[str, tuple[int, ...]], model: ModelFacts) -> dict[str, int]:
    """The rank of each adapted layer, by the layer's name in the model."""
    ranks: dict[str, int] = {}
    for name, shape in shapes.items():
        layer, _, matrix = name.removeprefix(_PREFIX).partition(".lora_")
        if not name.startswith(_PREFIX) or matrix not in ("A.weight", "B.weight"):
            raise ValueError(f"adapter {path}: {name} is no low-rank matrix of a linear layer")
        weight = model.shapes.get(f"{layer}.weight")
        if weight is None:
            raise ValueError(f"adapter {path}: the model has no {layer}.weight to adapt; another base model?")
        rank = shape[0] if matrix == "A.weight" else shape[-1]
        expected = (rank, weight[-1]) if matrix == "A.weight" else (weight[0], rank)
        if len(weight) != 2 or shape != expected or ranks.setdefault(layer, rank) != rank:
            raise ValueError(
                f"adapter {path}: {name} is {list(shape)}, which does not fit the model's {layer}.weight "
                f"{list(weight)}; another base model?"
            )
    for layer in ranks:
        if any(f"{_PREFIX}{layer}.lora_{matrix}.weight" not in shapes for matrix in "AB"):
            raise ValueError(f"adapter {path}: {layer} has one of its two matrices only; the file was cut short?")
    return ranks


def lora_room(rank: int) -> int:
    """The rank that vLLM keeps room for, one of a few.

    Raises:
        ValueError: it is above the largest.
    """
    rooms = (8, 16, 32, 64, 128, 256, 320, 512)
    if rank > rooms[-1]:
        raise ValueError(f"an adapter of rank {rank} is more than vLLM takes ({rooms[-1]}); merge it into the model")
    return next(room for room in rooms if rank <= room)
