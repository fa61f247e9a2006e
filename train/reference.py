"""What would the model that the run started from say? It is the reference of the KL penalty, where beta > 0.

With LoRA it is the trained model with its adapters switched off, which costs no memory. With all weights trained it is
a frozen second model in each process, of the same type as the trained one: the divergence starts at exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from train.config import GrpoConfig, LoraSettings
from train.model import load_model


def load_reference(
    path: str, *, config: GrpoConfig, lora: LoraSettings, device: torch.device
) -> PreTrainedModel | None:
    """The frozen model of the folder that the **run** started from, never that of a checkpoint it continues from; None
    where beta is 0 or adapters can be switched off. Errors as `load_model`."""
    if config.beta == 0 or lora.rank:
        return None
    return load_model(path, dtype="float32", device=device).eval().requires_grad_(False)


def check_reference(model: PreTrainedModel, reference: PreTrainedModel | None, config: GrpoConfig) -> None:
    """Refuse a penalty without a reference, before anything is sampled.

    Raises:
        ValueError: beta > 0, and there are neither adapters to switch off nor a reference model.
    """
    if config.beta > 0 and reference is None and not _adapted_layers(model):
        raise ValueError(
            f"beta = {config.beta} needs a reference: hand in what train.reference.load_reference gives, or train "
            "adapters (lora.rank)"
        )


@contextmanager
def reference_model(model: PreTrainedModel, reference: PreTrainedModel | None) -> Iterator[PreTrainedModel]:
    """Inside it the reference can be called, without gradients: `reference`, or `model` with its adapters off."""
    layers = [] if reference is not None else _adapted_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        with torch.no_grad():
            yield model if reference is None else reference
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:  # switching adapters off freezes them
            parameter.requires_grad_(True)


def _adapted_layers(model: PreTrainedModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]
