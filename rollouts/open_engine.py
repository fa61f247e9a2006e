"""The engine that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from rollouts.config import EngineConfig
from rollouts.engine import Engine


def open_engine(config: EngineConfig, *, model: str, policy_version: int = 0) -> Engine:
    """Load `model` into the configured engine; blocks until it can sample.

    Raises:
        ValueError: there is no model in the folder, or vLLM is not installed.
        EngineError: the engine refused the model.
    """
    if config.kind == "transformers":
        from rollouts.engine_transformers import TransformersEngine

        return TransformersEngine(
            Path(model),
            max_context_tokens=config.max_context_tokens,
            max_batch=config.max_concurrent,
            dtype=config.dtype,
            policy_version=policy_version,
        )
    from rollouts.engine_vllm import VllmEngine
    from rollouts.engine_vllm_start import VllmOptions

    options = VllmOptions(
        dtype=config.dtype,
        max_concurrent=config.max_concurrent,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
    return VllmEngine(
        Path(model), max_context_tokens=config.max_context_tokens, options=options, policy_version=policy_version
    )
