"""A trainer of one or more processes, and a vLLM engine on the first: `python -m ... MODEL ORDER` (who starts first).

Trains one step on the engine's samples, hands the new weights over, checks them, closes the engine, and uses the
trainer's process group once more. Any failure is an exit code.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from data.types import SamplingParams
from rollouts.engine_transformers import score_tokens
from rollouts.engine_vllm import VllmEngine
from rollouts.engine_vllm_start import VllmOptions
from rollouts.weight_check import check_weights
from tests.rollouts.tiny_llama import make_llama, some_prompt


def start_engine(folder: Path) -> VllmEngine:
    environment, state, threads = dict(os.environ), torch.get_rng_state(), torch.get_num_threads()
    python_state, setter = random.getstate(), torch.set_num_threads
    engine = VllmEngine(folder, options=VllmOptions(kv_cache_gib=0.0625))
    added = {name for name in os.environ if environment.get(name) != os.environ[name]}
    assert added <= {"TORCHINDUCTOR_CACHE_DIR"}, added  # torch's own, at its first import of the compiler
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, setter)
    return engine


async def main(folder: Path, order: str) -> None:
    is_first = int(os.environ.get("RANK", "0")) == 0
    engine = start_engine(folder) if is_first and order == "engine_first" else None
    accelerator = Accelerator(cpu=True)
    if is_first and engine is None:
        engine = start_engine(folder)
    assert accelerator.num_processes == int(os.environ.get("WORLD_SIZE", "1"))

    rows = torch.zeros(4, 16, dtype=torch.long)
    if engine is not None:
        params = SamplingParams(max_tokens=16, stop_token_ids=(), seed=1)
        calls = [engine.generate(f"c{i}", some_prompt(i), params) for i in range(4)]
        rows = torch.tensor([completion.token_ids for completion in await asyncio.gather(*calls)])
    rows = accelerator.reduce(rows)  # the others add zeros

    plain = make_llama(0)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    accelerator.backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step()
    if engine is not None:
        weights = accelerator.unwrap_model(model)
        await engine.load_weights(weights.state_dict(), 1)
        await check_weights(engine, lambda ids: score_tokens(weights, ids), [some_prompt(9)], 1e-3)
        await engine.close()
    # DDP holds the process group. Freed after everything else, it would join a gloo thread with the interpreter's lock
    # held, while that thread may wait for the lock: seen as a process that never ends.
    model, optimizer = accelerator.free_memory(model, optimizer)
    total = accelerator.reduce(torch.ones(1))
    assert total.item() == accelerator.num_processes
    accelerator.end_training()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
