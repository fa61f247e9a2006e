"""What only the vLLM engine has: it leaves its process as it was, and takes weights in a child process too."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from data.types import SamplingParams
from rollouts.engine import EngineError
from rollouts.engine_vllm import VllmEngine
from rollouts.engine_vllm_start import VllmOptions
from tests.requirements import require
from tests.rollouts.tiny_llama import MAX_CONTEXT, make_llama, reference_logprobs, save_llama, some_prompt

SMALL = VllmOptions(kv_cache_gib=0.0625)


def globals_of_the_process() -> dict[str, object]:
    """What a library could change under a trainer's feet."""
    torchs_own = ("TORCHINDUCTOR_CACHE_DIR",)  # set by torch at its first import of the compiler
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in torchs_own},
        "random": random.getstate(),
        "torch random": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    require("vllm")
    engine = VllmEngine(folder, options=SMALL)
    yield engine
    asyncio.run(engine.close())


def sampling(max_tokens: int, **changed: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "stop_token_ids": (), "seed": 1, **changed})


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model in .*config\.json") as caught:
        VllmEngine(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=f"takes 2 to {MAX_CONTEXT}"):
        VllmEngine(folder, max_context_tokens=MAX_CONTEXT + 1)


@pytest.mark.vllm
def test_a_model_that_vllm_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    require("vllm")
    save_llama(tmp_path, 0, head_dim=24)
    with pytest.raises(EngineError, match="vLLM did not start") as caught:
        VllmEngine(tmp_path, options=SMALL)
    assert "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


@pytest.mark.vllm
def test_starting_sampling_and_closing_leave_the_process_as_it_was(folder: Path) -> None:
    require("vllm")
    before = globals_of_the_process()
    engine = VllmEngine(folder, options=SMALL)
    assert globals_of_the_process() == before
    accelerator = Accelerator(cpu=True)
    asyncio.run(engine.close())
    assert accelerator.num_processes == 1
    assert globals_of_the_process() == before
    assert not torch.distributed.is_initialized()


@pytest.mark.vllm
def test_a_number_that_vllm_does_not_take_is_refused_in_one_line(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match=r"temperature must be in \[0, 2\]") as caught:
        asyncio.run(engine.generate("c", some_prompt(0), sampling(4, temperature=3.0)))
    assert "\n" not in str(caught.value)


@pytest.mark.vllm
def test_a_structural_tag_needs_an_engine_that_was_started_for_it(engine: VllmEngine) -> None:
    params = SamplingParams(max_tokens=4, stop_token_ids=(), structural_tag="{}")
    with pytest.raises(ValueError, match=r"needs an engine with VllmOptions\(constrain_calls=True\)"):
        asyncio.run(engine.generate("c", some_prompt(0), params))


@pytest.mark.vllm
def test_the_second_turn_says_how_much_of_its_prompt_was_cached(engine: VllmEngine) -> None:
    async def two_turns() -> list[int | None]:
        await engine.load_weights(make_llama(0).state_dict(), 0)  # drops what other tests left cached
        first = await engine.generate("t/0", some_prompt(3, 100), sampling(20))
        longer = [*some_prompt(3, 100), *first.token_ids, *some_prompt(4, 10)]
        second = await engine.generate("t/1", longer, sampling(4))
        return [first.cached_prompt_tokens, second.cached_prompt_tokens]

    # Blocks of 32 tokens are cached once they are full, sampled tokens too; the last one sampled was never computed.
    assert asyncio.run(two_turns()) == [0, 96]


@pytest.mark.vllm
def test_versions_are_those_of_the_step_that_sampled_each_token(engine: VllmEngine) -> None:
    async def relabel_after(wait_s: float) -> tuple[int, ...]:
        running = asyncio.create_task(engine.generate("c", some_prompt(0), sampling(200)))
        await asyncio.sleep(wait_s)
        await engine.run(lambda llm: llm.set_weight_version("5"))
        versions = (await running).policy_version
        await engine.run(lambda llm: llm.set_weight_version("0"))
        return versions

    # Before its first token or after its last one says nothing; how fast the machine is now decides when that is.
    tries = (asyncio.run(relabel_after(wait_s)) for wait_s in (0.1, 0.02, 0.5, 2.0, 0.1, 0.02, 0.5, 2.0))
    versions = next(versions for versions in tries if len(set(versions)) > 1)
    assert set(versions) == {0, 5}
    assert list(versions) == sorted(versions)


@pytest.mark.vllm
def test_closing_ends_what_runs_and_refuses_what_comes(folder: Path) -> None:
    require("vllm")
    engine = VllmEngine(folder, options=SMALL)

    async def close_meanwhile() -> None:
        running = asyncio.create_task(engine.generate("c", some_prompt(0), sampling(200)))
        await asyncio.sleep(0)  # it is handed in
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("d", some_prompt(0), sampling(2))
        await engine.close()

    asyncio.run(close_meanwhile())


@pytest.mark.slow
@pytest.mark.vllm
def test_case_c08_a_synced_engine_equals_a_fresh_one(engine: VllmEngine, tmp_path: Path) -> None:
    """The fresh one is the second in this process, so it runs in a child process; it gets its sync too, as a file."""
    prefix, params = some_prompt(5, 300), sampling(40, temperature=0.0)

    async def answers(of: VllmEngine) -> list[tuple[int, ...]]:
        calls = [of.generate(f"c{i}", [*prefix, 7 + i], params) for i in range(4)]
        return [completion.token_ids for completion in await asyncio.gather(*calls)]

    async def compare() -> None:
        old = await answers(engine)
        await engine.load_weights(make_llama(1).state_dict(), 1)
        fresh = VllmEngine(save_llama(tmp_path, 1), options=SMALL, policy_version=1)
        new = await answers(fresh)
        assert await answers(engine) == new != old
        for both in (engine, fresh):
            await both.load_weights(make_llama(0).state_dict(), 2)
            assert await answers(both) == old
        running = asyncio.create_task(fresh.generate("long", prefix[:60], sampling(300)))
        await asyncio.sleep(0.1)
        assert (await fresh.load_weights(make_llama(1).state_dict(), 3)).requests_running == 1
        long = await running
        first = long.policy_version.count(2)
        assert long.policy_version == (2,) * first + (3,) * (300 - first)
        ids = [*prefix[:60], *long.token_ids]
        scores = [reference_logprobs(make_llama(seed), ids)[59:] for seed in (0, 1)]
        assert long.logprobs == pytest.approx(scores[0][:first] + scores[1][first:], abs=1e-4)
        await fresh.close()

    asyncio.run(compare())
