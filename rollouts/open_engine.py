"""The engine that a configuration asks for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rollouts.config import EngineConfig
from rollouts.engine import Engine


def open_engine(
    config: EngineConfig,
    *,
    model: str,
    policy_version: int = 0,
    constrain_calls: bool = False,
    can_sleep: bool = False,
    takes_weights: bool = False,
    adapter_rank: int = 0,
    wall_clock_s: float | None = None,
) -> Engine:
    """Load `model` into the configured engine, or connect to the servers that serve it; blocks until it can sample.

    `constrain_calls`: requests may come with a structural tag (`sampling.constrain_calls`).
    `can_sleep`: it will be told to give its memory to a trainer.
    `takes_weights`: a trainer will sync its weights to it; `adapter_rank`: or LoRA adapters up to this rank.
    `wall_clock_s`: what a trajectory has (`limits.wall_clock_s`): servers are waited for so much less that one that
    hangs ends a trajectory as a fault of the engine, not of the policy (`Patience.within`). None = no trajectories.

    Raises:
        ValueError: there is no model in the folder, vLLM is not installed, a server is not what is wanted, or
            `servers` and `kind` do not go together.
        EngineError: the engine refused the model, or a server does not answer.
    """
    if (config.kind == "server") != bool(config.servers):
        raise ValueError(
            f"engine.kind is {config.kind} and engine.servers names {len(config.servers)} servers: name one at least "
            "where the kind is server, such as http://127.0.0.1:8000, and none where it is not"
        )
    if config.kind == "server":
        from rollouts.engine_server import ServerEngine
        from rollouts.server_patience import Patience

        patience = Patience() if wall_clock_s is None else Patience.within(wall_clock_s)
        return ServerEngine(
            config.servers,
            model=Path(model),
            max_context_tokens=config.max_context_tokens,
            max_concurrent=config.max_concurrent,
            adapter=config.adapter,
            policy_version=policy_version,
            api_key=os.environ.get("VLLM_API_KEY"),  # vLLM's own variable: what opens a server opens it here too
            takes_weights=takes_weights,
            adapter_rank=adapter_rank,
            patience=replace(patience, sync_timeout_s=config.sync_timeout_s),
        )
    adapter = None if config.adapter is None else Path(config.adapter)
    if config.kind == "transformers":
        from rollouts.engine_transformers import TransformersEngine

        return TransformersEngine(
            Path(model),
            max_context_tokens=config.max_context_tokens,
            max_batch=config.max_concurrent,
            dtype=config.dtype,
            adapter=adapter,
            policy_version=policy_version,
        )
    from rollouts.engine_vllm import VllmEngine
    from rollouts.engine_vllm_start import VllmOptions

    options = VllmOptions(
        dtype=config.dtype,
        max_concurrent=config.max_concurrent,
        gpu_memory_utilization=config.gpu_memory_utilization,
        constrain_calls=constrain_calls,
        can_sleep=can_sleep,
        adapter_rank=adapter_rank,
    )
    return VllmEngine(
        Path(model),
        max_context_tokens=config.max_context_tokens,
        options=options,
        adapter=adapter,
        policy_version=policy_version,
    )
