"""One suite for every engine: what a rollout may rely on, whatever samples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.types import Completion, SamplingParams
from rollouts.engine import Engine, EngineError, SyncReport
from rollouts.engine_scripted import ScriptedEngine
from rollouts.engine_server import ServerEngine
from rollouts.engine_transformers import TransformersEngine
from rollouts.engine_vllm import VllmEngine
from rollouts.engine_vllm_start import VllmOptions
from tests.requirements import require
from tests.rollouts.real_servers import RealServer
from tests.rollouts.tiny_llama import (
    MAX_CONTEXT,
    VOCAB_SIZE,
    make_llama,
    reference_completion,
    reference_greedy,
    reference_logprobs,
    save_llama,
    some_prompt,
)

OLD, NEW = 0, 1  # seeds of the model
REAL = [
    "transformers",
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("server", marks=[pytest.mark.vllm, pytest.mark.slow]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), OLD)


@pytest.fixture(scope="module")
def server_engine(folder: Path) -> Iterator[Engine]:
    """One real server for all tests: it takes a minute to start."""
    require("vllm")
    # The model has no tokenizer; ids need none.
    more = ["--skip-tokenizer-init"]
    server = RealServer(folder, folder.parent / "server.log", max_context_tokens=MAX_CONTEXT, more=more)
    try:
        server.wait()
        engine = ServerEngine([server.address], model=folder, max_context_tokens=MAX_CONTEXT, takes_weights=True)
        yield engine
        asyncio.run(engine.close())
    finally:
        server.kill()


@pytest.fixture(scope="module")
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Engine]]:
    """Engines by kind, each started once: vLLM takes some 20 s."""
    started: dict[str, Engine] = {}

    def get(kind: str) -> Engine:
        if kind == "server":
            return request.getfixturevalue("server_engine")
        if kind not in started:
            started[kind] = build(kind, folder)
        return started[kind]

    yield get
    for engine in started.values():
        asyncio.run(engine.close())


def build(kind: str, folder: Path) -> Engine:
    if kind == "scripted":
        return ScriptedEngine(count_up, max_context_tokens=MAX_CONTEXT, vocab_size=VOCAB_SIZE)
    if kind == "transformers":
        return TransformersEngine(folder)
    require("vllm")
    return VllmEngine(folder, options=VllmOptions(kv_cache_gib=0.0625))


def count_up(prompt_ids: Sequence[int]) -> list[int]:
    return [(prompt_ids[-1] + 1 + i) % VOCAB_SIZE for i in range(MAX_CONTEXT)]


@pytest.fixture(params=REAL)
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Iterator[Engine]:
    """A real engine with the old weights."""
    real = engines(request.param)
    yield real
    if real.policy_version != OLD:
        asyncio.run(real.load_weights(make_llama(OLD).state_dict(), OLD))


@pytest.fixture(params=["scripted", *REAL])
def any_engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    """The scripted one too, for what does not depend on a model."""
    return engines(request.param)


def sampling(max_tokens: int = 12, seed: int | None = 1, **changed: float | tuple[int, ...]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": seed, "stop_token_ids": (), **changed})


def run_one(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
    return asyncio.run(engine.generate("c", prompt_ids, params))


async def sample_all(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Completion]:
    calls = [engine.generate(f"c{i}", prompt, params) for i, (prompt, params) in enumerate(requests)]
    return await asyncio.gather(*calls)


def test_a_completion_that_fills_max_tokens_ends_by_length(any_engine: Engine) -> None:
    completion = run_one(any_engine, some_prompt(0), sampling(max_tokens=7))
    assert completion.completion_id == "c"
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 7


def test_the_stop_token_is_the_last_one_and_has_a_logprob(any_engine: Engine) -> None:
    free = run_one(any_engine, some_prompt(0), sampling())
    stop = free.token_ids[5]
    stopped = run_one(any_engine, some_prompt(0), sampling(stop_token_ids=(stop, VOCAB_SIZE - 1)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_a_stop_token_in_the_last_place_is_a_stop(any_engine: Engine) -> None:
    free = run_one(any_engine, some_prompt(1), sampling(max_tokens=3))
    stopped = run_one(any_engine, some_prompt(1), sampling(max_tokens=3, stop_token_ids=free.token_ids[2:]))
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids, "stop")


@pytest.mark.parametrize(
    ("prompt_ids", "max_tokens", "words"),
    [
        ([], 4, "empty"),
        (some_prompt(0, MAX_CONTEXT - 3), 4, "context"),
        ([5, VOCAB_SIZE], 4, "vocabulary"),
        ([5, -1], 4, "vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_sampled_after_is_refused_in_one_line(
    any_engine: Engine, prompt_ids: list[int], max_tokens: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        run_one(any_engine, prompt_ids, sampling(max_tokens))
    assert "\n" not in str(caught.value)


def test_prompt_and_completion_may_fill_the_context(any_engine: Engine) -> None:
    completion = run_one(any_engine, some_prompt(0, MAX_CONTEXT - 4), sampling(max_tokens=4))
    assert len(completion.token_ids) == 4


def test_every_token_carries_the_version_of_the_weights(any_engine: Engine) -> None:
    weights = make_llama(OLD).state_dict()
    for version in (3, 0):
        asyncio.run(any_engine.load_weights(weights, version))
        assert any_engine.policy_version == version
        assert run_one(any_engine, some_prompt(0), sampling(max_tokens=4)).policy_version == (version,) * 4


def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine: Engine) -> None:
    requests = [(some_prompt(i, 5 + 9 * i), sampling(max_tokens=8 + i, seed=i)) for i in range(8)]
    alone = [run_one(engine, prompt, params) for prompt, params in requests]
    together = asyncio.run(sample_all(engine, requests))
    backwards = asyncio.run(sample_all(engine, requests[::-1]))[::-1]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.token_ids for c in backwards] == [c.token_ids for c in alone]


def test_another_seed_gives_other_tokens_and_no_seed_too(engine: Engine) -> None:
    seeds = [0, 1, 2, -1, None, None]
    completions = asyncio.run(sample_all(engine, [(some_prompt(0), sampling(seed=seed)) for seed in seeds]))
    assert len({c.token_ids for c in completions}) == len(seeds)
    assert run_one(engine, some_prompt(0), sampling(seed=-1)).token_ids == completions[3].token_ids


@pytest.mark.parametrize(("temperature", "top_p"), [(0.6, 1.0), (1.0, 1.0), (1.5, 1.0), (1.0, 0.7)])
def test_case_c05_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Engine, temperature: float, top_p: float
) -> None:
    prompt = some_prompt(2)
    completion = run_one(engine, prompt, sampling(40, temperature=temperature, top_p=top_p))
    expected = reference_logprobs(make_llama(OLD), [*prompt, *completion.token_ids], temperature, top_p)
    assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)


ALTERED: list[dict[str, float]] = [
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.05},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.01, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {
        "temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.02,
        "repetition_penalty": 1.1, "presence_penalty": -0.3, "frequency_penalty": 0.6,
    },
]  # fmt: skip


@pytest.mark.parametrize("altered", ALTERED, ids=lambda altered: "+".join(altered))
def test_case_c07_logprobs_are_of_what_cuts_and_penalties_leave(engine: Engine, altered: dict[str, float]) -> None:
    prompt, params = some_prompt(7), sampling(60, seed=11, **altered)
    completion = run_one(engine, prompt, params)
    expected = reference_completion(make_llama(OLD), prompt, completion.token_ids, params)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_altered_requests_share_a_batch_and_stay_themselves(engine: Engine) -> None:
    requests = [(some_prompt(i), sampling(20 + i, seed=i, **altered)) for i, altered in enumerate([{}, *ALTERED])]
    alone = [run_one(engine, prompt, params) for prompt, params in requests]
    together = asyncio.run(sample_all(engine, requests * 2))
    assert [c.token_ids for c in together] == [c.token_ids for c in alone] * 2
    for (prompt, params), completion in zip(requests, together, strict=False):
        expected = reference_completion(make_llama(OLD), prompt, completion.token_ids, params)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_penalties_count_at_temperature_0(engine: Engine) -> None:
    plain = run_one(engine, some_prompt(3), sampling(30, temperature=0.0))
    altered = run_one(engine, some_prompt(3), sampling(30, temperature=0.0, frequency_penalty=2.0))
    assert len(set(altered.token_ids)) > len(set(plain.token_ids))


def test_temperature_0_is_greedy_with_the_logprobs_of_temperature_1(engine: Engine) -> None:
    prompt, model = some_prompt(3), make_llama(OLD)
    completion = run_one(engine, prompt, sampling(temperature=0.0))
    assert completion.token_ids == reference_greedy(model, prompt, 12)
    expected = reference_logprobs(model, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [2, 3, 40, MAX_CONTEXT])
def test_scores_are_the_models_logprobs(engine: Engine, length: int) -> None:
    ids = some_prompt(4, length)
    for _ in range(2):  # the second time its prefix is cached
        scores = asyncio.run(engine.score(ids))
        assert scores == pytest.approx(reference_logprobs(make_llama(OLD), ids), abs=1e-4)


def test_scoring_and_sampling_at_once_do_not_mix(engine: Engine) -> None:
    async def both() -> tuple[list[list[float]], list[Completion]]:
        scoring = [engine.score(some_prompt(i, 30)) for i in range(4)]
        requests = [(some_prompt(i), sampling(20, seed=i)) for i in range(4)]
        scores, completions = await asyncio.gather(asyncio.gather(*scoring), sample_all(engine, requests))
        return scores, completions

    scores, completions = asyncio.run(both())
    model = make_llama(OLD)
    for i, (score, completion) in enumerate(zip(scores, completions, strict=True)):
        assert score == pytest.approx(reference_logprobs(model, some_prompt(i, 30)), abs=1e-4)
        expected = reference_logprobs(model, [*some_prompt(i), *completion.token_ids])[19:]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_32_requests_at_once(engine: Engine) -> None:
    requests = [(some_prompt(i, 3 + i * 5), sampling(4 + i % 9, seed=i, temperature=0.5 + i / 32)) for i in range(32)]
    completions = asyncio.run(sample_all(engine, requests))
    model = make_llama(OLD)
    for (prompt, params), completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == params.max_tokens
        expected = reference_logprobs(model, [*prompt, *completion.token_ids], params.temperature)
        assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)


def test_case_c08_after_a_sync_a_shared_prefix_says_what_new_weights_say(engine: Engine) -> None:
    prefix = some_prompt(5, 300)  # more than one block of the prefix cache
    requests = [([*prefix, 7 + i], sampling(temperature=0.0)) for i in range(3)]
    before = asyncio.run(sample_all(engine, requests))
    new = make_llama(NEW)
    asyncio.run(engine.load_weights(new.state_dict(), NEW))
    after = asyncio.run(sample_all(engine, requests))
    for (prompt, _), old, completion in zip(requests, before, after, strict=True):
        assert completion.token_ids != old.token_ids
        assert completion.token_ids == reference_greedy(new, prompt, 12)
        expected = reference_logprobs(new, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_request_in_flight_goes_on_with_new_weights_and_each_token_knows_its_own(engine: Engine) -> None:
    new, count = make_llama(NEW), 300

    async def sync_meanwhile(number: int) -> tuple[list[Completion], SyncReport]:
        requests = [(some_prompt(number + i, 40), sampling(count, seed=i)) for i in range(3)]
        work = asyncio.create_task(sample_all(engine, requests))
        await asyncio.sleep(0.02 + number / 150)
        report = await engine.load_weights(new.state_dict(), NEW)
        return await work, report

    for number in range(0, 30, 3):  # where the machine is fast or slow, it may be over or not have begun
        completions, report = asyncio.run(sync_meanwhile(number))
        if all(len(set(completion.policy_version)) == 2 for completion in completions):
            break
        asyncio.run(engine.load_weights(make_llama(OLD).state_dict(), OLD))
    assert report.requests_running == 3
    for place, completion in enumerate(completions):
        old = completion.policy_version.count(OLD)
        assert completion.policy_version == (OLD,) * old + (NEW,) * (count - old)
        ids = [*some_prompt(number + place, 40), *completion.token_ids]
        expected = reference_logprobs(make_llama(OLD), ids)[39:][:old] + reference_logprobs(new, ids)[39:][old:]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_case_c10_two_syncs_are_as_one_and_leave_the_given_tensors_as_they_were(engine: Engine) -> None:
    """Every tensor gets values of its own, so that none can stand in for another."""
    new = make_llama(NEW)
    with torch.no_grad():
        for number, parameter in enumerate(new.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1 + 0.01)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    scores: list[list[float]] = []
    for _ in range(2):
        asyncio.run(engine.load_weights(new.state_dict(), NEW))
        scores.append(asyncio.run(engine.score(some_prompt(6))))
    assert scores[0] == scores[1] == pytest.approx(reference_logprobs(new, some_prompt(6)), abs=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in new.state_dict().items())


def test_case_c09_a_sync_says_whether_anything_changed(any_engine: Engine) -> None:
    weights = {name: tensor.clone() for name, tensor in make_llama(OLD).state_dict().items()}
    asyncio.run(any_engine.load_weights(weights, OLD))
    assert asyncio.run(any_engine.load_weights(weights, OLD)).changed == 0
    weights["model.norm.weight"][5] += 1e-6
    assert asyncio.run(any_engine.load_weights(weights, OLD)).changed == 1


def test_a_tied_head_may_be_left_out(engine: Engine) -> None:
    new = make_llama(NEW)
    asyncio.run(engine.load_weights(dict(new.named_parameters()), NEW))
    scores = asyncio.run(engine.score(some_prompt(6)))
    assert scores == pytest.approx(reference_logprobs(new, some_prompt(6)), abs=1e-4)


@pytest.mark.parametrize("fault", ["unknown", "missing", "shape"])
def test_case_c11_weights_that_do_not_fit_are_refused_and_change_nothing(engine: Engine, fault: str) -> None:
    weights = dict(make_llama(NEW).state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = weights.pop(name)
    if fault == "unknown":
        weights |= {name: tensor, "base_model.model.lora_A.weight": tensor}
    if fault == "shape":
        weights[name] = tensor[:-1]
    with pytest.raises(EngineError, match="lora_A" if fault == "unknown" else "layers.1.mlp.up_proj"):
        asyncio.run(engine.load_weights(weights, NEW))
    assert engine.policy_version == OLD
    scores = asyncio.run(engine.score(some_prompt(6)))
    assert scores == pytest.approx(reference_logprobs(make_llama(OLD), some_prompt(6)), abs=1e-4)


def test_an_engine_tells_its_load(any_engine: Engine) -> None:
    capacity = any_engine.load.capacity

    async def watch() -> list[tuple[int, int]]:
        calls = [
            asyncio.create_task(any_engine.generate(f"c{i}", some_prompt(i), sampling(20, seed=i)))
            for i in range(capacity + 3)
        ]
        seen = []
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            load = any_engine.load
            assert load.running + load.waiting == sum(not call.done() for call in calls)
            seen.append((load.running, load.waiting))
        return seen

    seen = asyncio.run(watch())
    assert max(running for running, _ in seen) <= capacity
    assert max(waiting for _, waiting in seen) >= 3
    assert (any_engine.load.running, any_engine.load.waiting) == (0, 0)


def test_a_sleeping_engine_samples_nothing_and_wakes_as_it_was(any_engine: Engine) -> None:
    prompt, params = some_prompt(8), sampling(temperature=0.0)

    async def sleep_between() -> tuple[Completion, Completion]:
        before = await any_engine.generate("c", prompt, params)
        for _ in range(2):  # asleep already, it stays so
            await any_engine.sleep()
            with pytest.raises(EngineError, match="asleep: call wake"):
                await any_engine.generate("c", prompt, params)
            with pytest.raises(EngineError, match="asleep: call wake"):
                await any_engine.score(prompt)
            with pytest.raises(EngineError, match="asleep: call wake"):
                await any_engine.load_weights(make_llama(OLD).state_dict(), OLD)
        for _ in range(2):
            await any_engine.wake()
        return before, await any_engine.generate("c", prompt, params)

    before, after = asyncio.run(sleep_between())
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_case_c34_an_engine_that_slept_without_its_weights_samples_only_after_new_ones(engine: Engine) -> None:
    prompt, params, new = some_prompt(8), sampling(temperature=0.0), make_llama(NEW)

    async def cycle() -> Completion:
        await engine.sleep(keep_weights=False)
        await engine.sleep()  # what is gone is gone
        await engine.wake()
        with pytest.raises(EngineError, match="load_weights before it samples"):
            await engine.generate("c", prompt, params)
        with pytest.raises(EngineError, match="load_weights before it samples"):
            await engine.score(prompt)
        await engine.load_weights(new.state_dict(), NEW)
        return await engine.generate("c", prompt, params)

    assert asyncio.run(cycle()).token_ids == reference_greedy(new, prompt, 12)


def test_an_engine_does_not_fall_asleep_while_a_request_runs(any_engine: Engine) -> None:
    async def sleep_meanwhile() -> Completion:
        running = asyncio.create_task(any_engine.generate("c", some_prompt(0), sampling(200)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="sleep while 1 requests run"):
            await any_engine.sleep()
        return await running

    assert len(asyncio.run(sleep_meanwhile()).token_ids) == 200


def test_a_cancelled_request_leaves_the_engine_usable(engine: Engine) -> None:
    async def cancel_one() -> Completion:
        # Where the machine stands still for a moment, the long one may be over before it is cancelled: again then.
        for number in range(20):
            long = asyncio.create_task(engine.generate(f"long/{number}", some_prompt(0), sampling(300, seed=9)))
            await asyncio.sleep(0.05)
            other = asyncio.create_task(engine.generate(f"other/{number}", some_prompt(1), sampling(seed=2)))
            if long.cancel():
                break
            await other
        with pytest.raises(asyncio.CancelledError):
            await long
        return replace(await other, completion_id="other")

    completion = asyncio.run(cancel_one())
    assert completion == asyncio.run(engine.generate("other", some_prompt(1), sampling(seed=2)))
    asyncio.run(engine.load_weights(make_llama(OLD).state_dict(), OLD))  # nothing runs any more
