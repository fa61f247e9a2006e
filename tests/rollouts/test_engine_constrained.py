"""Constrained calls: a model with random weights writes calls that obey the schema, and its prose stays what it was."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from data.call_grammar import CallGrammar
from data.types import Completion, SamplingParams
from rollouts.engine import Engine
from rollouts.engine_transformers import TransformersEngine
from rollouts.engine_vllm import VllmEngine
from rollouts.engine_vllm_start import VllmOptions
from tests.requirements import require
from tests.rollouts.tiny_llama import some_prompt

OPEN, STOP = 4, 3  # <tool_call> and <|im_end|> of the embedded tokenizer
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [
                {
                    "begin": '<tool_call>\n{"name": "weather", "arguments": ',
                    "content": {"type": "json_schema", "json_schema": SCHEMA},
                    "end": "}\n</tool_call>",
                }
            ],
        },
    }
)
REQUESTS = 24
CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained("models/embedded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's shape and tokenizer, with random weights."""
    folder = tmp_path_factory.mktemp("random")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("models/embedded") / name, folder)
    config = AutoConfig.from_pretrained("models/embedded")
    config.initializer_range = 0.15  # so that distributions are not flat
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data[[OPEN, STOP]] *= torch.tensor([[4.0], [3.0]])  # so that they come often
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Callable[[str], Engine]]:
    started: dict[str, Engine] = {}

    def get(kind: str) -> Engine:
        if kind == "vllm":
            require("vllm")
        if kind not in started:
            options = VllmOptions(kv_cache_gib=0.25, constrain_calls=True)
            started[kind] = (
                TransformersEngine(folder) if kind == "transformers" else VllmEngine(folder, options=options)
            )
        return started[kind]

    yield get
    for engine in started.values():
        asyncio.run(engine.close())


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def completions(
    request: pytest.FixtureRequest, engines: Callable[[str], Engine]
) -> tuple[list[Completion], list[Completion]]:
    """The same requests with and without the tag, in one batch."""
    engine = engines(request.param)

    async def sample() -> list[Completion]:
        calls = [
            engine.generate(f"{seed}/{tag is None}", some_prompt(seed), sampling(seed, tag))
            for seed in range(REQUESTS)
            for tag in (TAG, None)
        ]
        return await asyncio.gather(*calls)

    both = asyncio.run(sample())
    return both[::2], both[1::2]


def sampling(seed: int, tag: str | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=60, stop_token_ids=(STOP,), seed=seed, temperature=0.8 + seed % 3 / 5, structural_tag=tag
    )


def decode(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    return str(tokenizer.decode(list(completion.token_ids)))


Both = tuple[list[Completion], list[Completion]]


def test_a_call_once_begun_obeys_name_and_schema(completions: Both, tokenizer: PreTrainedTokenizerBase) -> None:
    whole = 0
    for completion in completions[0]:
        text = decode(tokenizer, completion)
        for found in CALL.finditer(text):
            if not found[2]:
                assert completion.finish_reason == "length"  # cut inside the call; a stop token cannot end it there
                continue
            call = json.loads(found[1])
            assert call["name"] == "weather"
            jsonschema.validate(call["arguments"], SCHEMA)
            whole += 1
    assert whole >= 3
    free = [found[1] for c in completions[1] for found in CALL.finditer(decode(tokenizer, c))]
    assert free
    assert not any("weather" in body for body in free)


def test_prose_is_what_it_was_without_the_grammar(completions: Both) -> None:
    for held, free in zip(*completions, strict=True):
        end = held.token_ids.index(OPEN) + 1 if OPEN in held.token_ids else len(held.token_ids)
        assert held.token_ids[:end] == free.token_ids[:end]
        assert held.logprobs[:end] == pytest.approx(free.logprobs[:end], abs=1e-4)


def test_stop_tokens_end_a_constrained_turn(completions: Both) -> None:
    stopped = [c for c in completions[0] if c.finish_reason == "stop"]
    assert stopped
    assert all(c.token_ids[-1] == STOP and STOP not in c.token_ids[:-1] for c in stopped)


def test_logprobs_are_over_what_the_grammar_allows(
    completions: Both, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The grammar is followed again from the ids alone: the same tokens are allowed, and one that stands alone is
    certain."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    grammar = CallGrammar(tokenizer, model.config.vocab_size)
    forced = 0
    reported = any(completion.forced for completion in completions[0])  # the transformers engine says it, vLLM cannot
    for seed, completion in enumerate(completions[0]):
        prompt = some_prompt(seed)
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1].double()
        state, alone = grammar.start(TAG, (STOP,)), []
        for place, (row, token, logprob) in enumerate(
            zip(rows, completion.token_ids, completion.logprobs, strict=True)
        ):
            allowed = state.allowed()
            kept = (row / sampling(seed, TAG).temperature)[allowed].log_softmax(-1)
            assert logprob == pytest.approx(float(kept[int(allowed[:token].sum())]), abs=1e-4)
            if allowed.sum() == 1:
                assert logprob == 0
                alone.append(place)
            state.accept(token)
        assert completion.forced == (tuple(alone) if reported else ())
        forced += len(alone)
    assert forced >= 10


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.parametrize("tag", ["no JSON", "{}", '{"type": "structural_tag", "format": {"type": "rhyme"}}'])
def test_what_is_no_structural_tag_is_refused_in_one_line(
    engines: Callable[[str], Engine], kind: str, tag: str
) -> None:
    with pytest.raises(ValueError, match=r"tag|JSON") as caught:
        asyncio.run(engines(kind).generate("c", some_prompt(0), sampling(0, tag)))
    assert "\n" not in str(caught.value)
