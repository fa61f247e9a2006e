"""A real server that takes a trainer's adapters, twice, the second time while a request runs.

`tests/contracts` does the same with full weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError
from rollouts.engine_adapter import AdapterWeights
from rollouts.engine_server import ServerEngine
from tests.requirements import require
from tests.rollouts.real_servers import RealServer
from tests.rollouts.tiny_llama import MAX_CONTEXT, make_llama, reference_logprobs, save_llama, some_prompt
from train.config import LoraSettings
from train.lora import adapter_weights, add_lora, full_state_dict

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
RANK = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, Path]]:
    require("vllm")
    folder = save_llama(tmp_path_factory.mktemp("model"), 0)
    log = folder.parent / "server.log"
    more = ["--skip-tokenizer-init"]
    real = RealServer(folder, log, max_context_tokens=MAX_CONTEXT, adapter_rank=RANK, more=more)
    try:
        real.wait()
        yield real, folder
    finally:
        real.kill()


def trained(seed: int) -> tuple[AdapterWeights, torch.nn.Module]:
    """An adapter as the trainer has it, and the model that it makes, merged."""
    model = add_lora(make_llama(0), LoraSettings(rank=RANK, alpha=8, sync="adapter"), seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    merged = make_llama(0)
    merged.load_state_dict(full_state_dict(model))
    return adapter_weights(model), merged


def test_adapters_are_synced_while_a_request_runs(server: tuple[RealServer, Path]) -> None:
    real, folder = server
    engine = ServerEngine([real.address], model=folder, max_context_tokens=MAX_CONTEXT, adapter_rank=RANK)
    adapters = {version: trained(version) for version in (1, 2)}
    params = SamplingParams(max_tokens=300, seed=5, stop_token_ids=())

    async def sync_meanwhile(number: int) -> Completion:
        await engine.load_adapter(adapters[1][0], 1)
        running = asyncio.create_task(engine.generate(f"c/{number}", some_prompt(number, 40), params))
        await asyncio.sleep(0.05 + number / 50)
        await engine.load_adapter(adapters[2][0], 2)
        return await running

    try:
        for number in range(10):  # where the machine is fast or slow, it may be over or not have begun
            completion = asyncio.run(sync_meanwhile(number))
            if len(set(completion.policy_version)) == 2:
                break
        first = completion.policy_version.count(1)
        assert completion.policy_version == (1,) * first + (2,) * (300 - first)
        ids = [*some_prompt(number, 40), *completion.token_ids]
        scores = {version: reference_logprobs(adapters[version][1], ids)[39:] for version in adapters}
        assert completion.logprobs == pytest.approx(scores[1][:first] + scores[2][first:], abs=1e-4)
        assert asyncio.run(engine.score(some_prompt(3))) == pytest.approx(
            reference_logprobs(adapters[2][1], some_prompt(3)), abs=1e-4
        )
        with pytest.raises(EngineError, match="would put it on top"):
            asyncio.run(engine.load_weights(make_llama(1).state_dict(), 3))
    finally:
        asyncio.run(engine.close())
