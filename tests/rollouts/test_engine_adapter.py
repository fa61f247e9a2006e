"""LoRA adapters: what does not fit is refused from its folder, and what fits is sampled with as if it were merged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError
from rollouts.engine_adapter import lora_room, read_adapter, read_adapter_facts
from rollouts.engine_checks import read_model_facts
from rollouts.engine_transformers import TransformersEngine
from rollouts.engine_vllm import VllmEngine
from rollouts.engine_vllm_start import VllmOptions
from tests.requirements import require
from tests.rollouts.tiny_llama import make_llama, reference_logprobs, save_llama, some_prompt

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
LoraEngine = TransformersEngine | VllmEngine


def save_adapter(folder: Path, seed: int, **changed: object) -> LlamaForCausalLM:
    """Write an adapter of random matrices; returns the model that it makes, merged."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": LAYERS, **changed})  # type: ignore[arg-type]
    model = get_peft_model(make_llama(0), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(str(folder))
    return model.merge_and_unload().eval()  # type: ignore[operator]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, LlamaForCausalLM]]:
    folder = tmp_path_factory.mktemp("adapters")
    changes: dict[str, dict[str, object]] = {
        "first": {},
        "second": {"r": 8, "target_modules": LAYERS[:2]},
        "scaled": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        "wide": {"r": 16},
    }
    return {
        name: (folder / name, save_adapter(folder / name, seed, **changed))
        for seed, (name, changed) in enumerate(changes.items())
    }


Adapters = dict[str, tuple[Path, LlamaForCausalLM]]


@pytest.fixture(scope="module")
def engines(folder: Path, adapters: Adapters) -> Iterator[Callable[[str], LoraEngine]]:
    started: dict[str, LoraEngine] = {}

    def get(kind: str) -> LoraEngine:
        first = adapters["first"][0]
        if kind == "vllm":
            require("vllm")
        if kind not in started:
            options = VllmOptions(kv_cache_gib=0.0625)
            started[kind] = (
                TransformersEngine(folder, adapter=first)
                if kind == "transformers"
                else VllmEngine(folder, options=options, adapter=first)
            )
        return started[kind]

    yield get
    for engine in started.values():
        asyncio.run(engine.close())


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, engines: Callable[[str], LoraEngine], adapters: Adapters) -> LoraEngine:
    engine = engines(request.param)
    if engine.policy_version:
        asyncio.run(engine.load_adapter(adapters["first"][0], 0))
    return engine


async def sample(engine: LoraEngine) -> list[Completion]:
    params = SamplingParams(max_tokens=20, stop_token_ids=(), seed=1)
    return await asyncio.gather(*(engine.generate(f"c{i}", some_prompt(i, 70), params) for i in range(3)))


def check_sampled_from(completions: list[Completion], model: LlamaForCausalLM) -> None:
    for number, completion in enumerate(completions):
        prompt = some_prompt(number, 70)
        expected = reference_logprobs(model, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_logprobs_are_those_of_the_merged_model(engine: LoraEngine, adapters: Adapters) -> None:
    check_sampled_from(asyncio.run(sample(engine)), adapters["first"][1])
    scores = asyncio.run(engine.score(some_prompt(4)))
    assert scores == pytest.approx(reference_logprobs(adapters["first"][1], some_prompt(4)), abs=1e-4)


@pytest.mark.parametrize("name", ["second", "scaled"])
def test_another_adapter_takes_over_with_its_version(engine: LoraEngine, adapters: Adapters, name: str) -> None:
    async def swap() -> tuple[list[Completion], list[Completion]]:
        await sample(engine)  # its prefixes are cached
        await engine.load_adapter(adapters[name][0], 7)
        new = await sample(engine)
        await engine.load_adapter(adapters["first"][0], 8)
        return new, await sample(engine)

    new, old = asyncio.run(swap())
    check_sampled_from(new, adapters[name][1])
    check_sampled_from(old, adapters["first"][1])
    assert {version for c in new for version in c.policy_version} == {7}
    assert {version for c in old for version in c.policy_version} == {8}
    assert all(not c.cached_prompt_tokens for c in new)


def test_a_prompt_is_scored_beside_requests_that_sample(engine: LoraEngine, adapters: Adapters) -> None:
    async def both() -> tuple[list[Completion], list[float]]:
        work = asyncio.create_task(sample(engine))
        await asyncio.sleep(0.01)
        scores = await engine.score(some_prompt(4))
        return await work, scores

    for _ in range(3):
        completions, scores = asyncio.run(both())
        check_sampled_from(completions, adapters["first"][1])
        assert scores == pytest.approx(reference_logprobs(adapters["first"][1], some_prompt(4)), abs=1e-4)


def test_an_adapter_may_be_given_in_memory(engine: LoraEngine, adapters: Adapters) -> None:
    folder, model = adapters["scaled"]
    report = asyncio.run(engine.load_adapter(read_adapter(folder), 9))
    assert report.tensors == len(read_adapter(folder).tensors)
    check_sampled_from(asyncio.run(sample(engine)), model)
    assert asyncio.run(engine.load_adapter(folder, 10)).changed == 0
    check_sampled_from(asyncio.run(sample(engine)), model)


def test_full_weights_under_an_adapter_are_refused(engine: LoraEngine) -> None:
    with pytest.raises(EngineError, match="sync it with load_adapter"):
        asyncio.run(engine.load_weights(make_llama(1).state_dict(), 1))


def test_an_adapter_that_does_not_fit_leaves_the_one_before(engine: LoraEngine, adapters: Adapters) -> None:
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        asyncio.run(engine.load_adapter(Path("nowhere"), 1))
    assert engine.policy_version == 0
    check_sampled_from(asyncio.run(sample(engine)), adapters["first"][1])


@pytest.mark.vllm
def test_an_adapter_wider_than_the_room_is_refused(engines: Callable[[str], LoraEngine], adapters: Adapters) -> None:
    with pytest.raises(ValueError, match="rank 16, the engine was started with room for 8"):
        asyncio.run(engines("vllm").load_adapter(adapters["wide"][0], 1))


def test_a_request_in_flight_goes_on_with_another_adapter(engine: LoraEngine, adapters: Adapters) -> None:
    async def swap_meanwhile(number: int) -> Completion:
        params = SamplingParams(max_tokens=300, stop_token_ids=(), seed=1)
        running = asyncio.create_task(engine.generate("c", some_prompt(number, 40), params))
        await asyncio.sleep(0.02 + number / 100)
        await engine.load_adapter(adapters["second"][0], 7)
        completion = await running
        await engine.load_adapter(adapters["first"][0], 0)
        return completion

    for number in range(20):  # where the machine is fast or slow, it may be over or not have begun
        completion = asyncio.run(swap_meanwhile(number))
        if len(set(completion.policy_version)) == 2:
            break
    old = completion.policy_version.count(0)
    ids = [*some_prompt(number, 40), *completion.token_ids]
    first, second = (reference_logprobs(adapters[name][1], ids)[39:] for name in ("first", "second"))
    assert completion.logprobs == pytest.approx(first[:old] + second[old:], abs=1e-4)


@pytest.mark.vllm
def test_an_engine_with_an_adapter_keeps_its_weights_asleep(engines: Callable[[str], LoraEngine]) -> None:
    with pytest.raises(EngineError, match="keeps its weights"):
        asyncio.run(engines("vllm").sleep(keep_weights=False))


def edit_config(folder: Path, **changed: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), r"no adapter_model\.safetensors"),
    "no configuration": (lambda f: (f / "adapter_config.json").unlink(), r"no adapter_config\.json"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is no JSON"),
    "another kind": (lambda f: edit_config(f, peft_type="IA3"), "peft_type is 'IA3'"),
    "DoRA": (lambda f: edit_config(f, use_dora=True), "use_dora = True is not supported; merge it"),
    "biases": (lambda f: edit_config(f, bias="all"), "bias = 'all' is not supported"),
    "whole layers": (lambda f: edit_config(f, modules_to_save=["lm_head"]), "modules_to_save .* only linear layers"),
    "PiSSA": (lambda f: edit_config(f, init_lora_weights="pissa"), "changes the model's own weights"),
    "another model": (lambda f: edit_tensors(f, lambda t: t.update({A.replace("layers.0", "layers.9"): t.pop(A)})),
                      r"no model\.layers\.9\.self_attn\.q_proj\.weight to adapt"),
    "another size": (lambda f: edit_tensors(f, lambda t: t.update({A: torch.zeros(4, 64)})), "does not fit the model"),
    "another rank": (lambda f: edit_tensors(f, lambda t: t.update({A: torch.zeros(2, 128)})), "does not fit the model"),
    "half a layer": (lambda f: edit_tensors(f, lambda t: t.pop(A)), "one of its two matrices only"),
    "an embedding": (lambda f: edit_tensors(f, lambda t: t.update({"base_model.model.lora_embedding_A": t.pop(A)})),
                     "no low-rank matrix of a linear layer"),
    "no safetensors": (lambda f: (f / "adapter_model.safetensors").write_text("version https"), "holds no weights"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_case_c11_what_does_not_fit_is_refused_in_one_line(folder: Path, tmp_path: Path, fault: str) -> None:
    save_adapter(tmp_path, 0)
    damage, words = FAULTS[fault]
    damage(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        read_adapter_facts(tmp_path, read_model_facts(folder))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapters_facts(folder: Path, adapters: Adapters) -> None:
    facts = read_adapter_facts(adapters["second"][0], read_model_facts(folder))
    assert facts.rank == 8
    assert facts.layers[0] == "model.layers.0.self_attn.k_proj"
    assert len(facts.layers) == 4  # two layers of the tiny model, two projections each


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_the_room_for_a_rank(rank: int, room: int) -> None:
    assert lora_room(rank) == room
    with pytest.raises(ValueError, match="merge it"):
        lora_room(513)
