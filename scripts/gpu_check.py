"""The checks that need a GPU: that vLLM keeps there what it keeps on a CPU, and that sleeping frees memory.

Each compares the vLLM engine, in float32, with the same model in plain torch. The model is a small one with random
weights, made on the spot with the tokenizer of --model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from data.call_grammar import CallGrammar
from data.types import Completion, SamplingParams
from envs.types import ToolSpec
from rollouts.engine import Engine
from rollouts.engine_vllm import VllmEngine
from rollouts.engine_vllm_start import VllmOptions
from rollouts.token_sampling import distribution, penalise
from scripts.console import run_main

EXAMPLE = "python -m scripts.gpu_check --model models/embedded"
TOLERANCE = 2e-3
"""Nats: float32 on both sides, with the rounding of other kernels."""
TOOL = ToolSpec(
    name="weather",
    description="",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


def check_gpu(model: Path) -> list[str]:
    """Run every check; returns a line for each.

    Raises:
        ValueError: a check failed; it says which, and by how much.
    """
    with tempfile.TemporaryDirectory(prefix="agentgrad-") as name:
        folder = Path(name)
        old, new = (save_random(model, folder / str(seed), seed) for seed in (0, 1))
        return [
            *asyncio.run(_check_sampling_and_sleep(folder / "0", old, new)),
            *asyncio.run(_check_adapter(folder, old)),
        ]


def save_random(model: Path, folder: Path, seed: int) -> PreTrainedModel:
    """The model's shape with random weights, its tokenizer beside it."""
    config = AutoConfig.from_pretrained(model)
    config.initializer_range = 0.15  # so that distributions are not flat
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return made.eval()


async def _check_sampling_and_sleep(folder: Path, old: PreTrainedModel, new: PreTrainedModel) -> list[str]:
    options = VllmOptions(dtype="float32", gpu_memory_utilization=0.3, constrain_calls=True, can_sleep=True)
    engine = VllmEngine(folder, options=options, max_context_tokens=512)
    try:
        lines = []
        for name, changed in PARAMETERS.items():
            worst = await _worst_difference(engine, old, folder, SamplingParams(**_BASE, **changed))
            lines.append(_judge(f"sampling, {name}", worst))
        return [*lines, await _check_kept(engine, old, folder), await _check_dropped(engine, new, folder)]
    finally:
        await engine.close()


async def _check_kept(engine: Engine, model: PreTrainedModel, folder: Path) -> str:
    """Case C34, first half: what slept with its weights samples as before."""
    params = SamplingParams(**_BASE)
    before = await _sample(engine, params)
    free = _free_memory()
    says_freed = await engine.sleep()
    freed = _free_memory() - free
    await engine.wake()
    after = await _sample(engine, params)
    if [c.token_ids for c in before] != [c.token_ids for c in after]:
        raise ValueError("sleep, weights kept: other tokens with the same seeds after it")
    if says_freed != (freed > 0):
        raise ValueError(f"sleep: the engine says {says_freed}, and {freed / 2**30:.2f} GiB were freed")
    return _judge(f"sleep, weights kept: {freed / 2**30:.2f} GiB freed", _worst(after, model, folder, params))


async def _check_dropped(engine: Engine, model: PreTrainedModel, folder: Path) -> str:
    """Case C34, second half: what slept without its weights samples from the new ones."""
    params, free = SamplingParams(**_BASE), _free_memory()
    await engine.sleep(keep_weights=False)
    freed = _free_memory() - free
    await engine.wake()
    await engine.load_weights(model.state_dict(), 1)
    worst = await _worst_difference(engine, model, folder, params)
    return _judge(f"sleep, weights dropped: {freed / 2**30:.2f} GiB freed", worst)


async def _check_adapter(folder: Path, base: PreTrainedModel) -> list[str]:
    """A LoRA adapter, and another one after it, sample as the merged models do."""
    merged = [_save_adapter(folder / f"adapter-{seed}", folder / "0", seed) for seed in (0, 1)]
    options = VllmOptions(dtype="float32", gpu_memory_utilization=0.3)
    engine = VllmEngine(folder / "0", options=options, max_context_tokens=512, adapter=folder / "adapter-0")
    params = SamplingParams(**_BASE)
    try:
        first = await _worst_difference(engine, merged[0], folder / "0", params)
        await engine.load_adapter(folder / "adapter-1", 1)
        second = await _worst_difference(engine, merged[1], folder / "0", params)
    finally:
        await engine.close()
    return [_judge("adapter", first), _judge("another adapter after it", second)]


def _save_adapter(folder: Path, base: Path, seed: int) -> PreTrainedModel:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(folder)
    return model.merge_and_unload().eval()


_BASE: dict[str, Any] = {"max_tokens": 64, "stop_token_ids": (), "seed": 1}
_TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "at_least_one": True,
            "tags": [
                {
                    "begin": f'<tool_call>\n{{"name": "{TOOL.name}", "arguments": ',
                    "content": {"type": "json_schema", "json_schema": TOOL.parameters},
                    "end": "}\n</tool_call>",
                }
            ],
        },
    }
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "a constrained call": {"structural_tag": _TAG},
}


async def _sample(engine: Engine, params: SamplingParams) -> list[Completion]:
    prompts = [_prompt(number) for number in range(8)]
    return await asyncio.gather(*(engine.generate(f"c{i}", prompt, params) for i, prompt in enumerate(prompts)))


def _prompt(number: int) -> list[int]:
    return [8 + (number * 131 + place * 17) % 500 for place in range(40)]


async def _worst_difference(engine: Engine, model: PreTrainedModel, folder: Path, params: SamplingParams) -> float:
    return _worst(await _sample(engine, params), model, folder, params)


def _worst(completions: Sequence[Completion], model: PreTrainedModel, folder: Path, params: SamplingParams) -> float:
    """The largest difference (nats) of a sampled token's logprob between the engine and the model in plain torch."""
    grammar = None
    if params.structural_tag is not None:
        grammar = CallGrammar(AutoTokenizer.from_pretrained(folder), model.config.vocab_size)
    worst = 0.0
    for number, completion in enumerate(completions):
        prompt, ids = _prompt(number), completion.token_ids
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
        state = None if grammar is None else grammar.start(params.structural_tag or "", params.stop_token_ids)
        for place, (row, token) in enumerate(zip(rows, ids, strict=True)):
            if state is not None:
                row = row.masked_fill(~state.allowed(), float("-inf"))
                state.accept(token)
            logprobs = distribution(penalise(row, params, prompt, ids[:place]), params)
            worst = max(worst, abs(float(logprobs[token]) - completion.logprobs[place]))
    return worst


def _judge(what: str, worst: float) -> str:
    if not worst <= TOLERANCE:
        raise ValueError(f"{what}: vLLM and torch differ by {worst:.3g} nats, more than {TOLERANCE:g}")
    return f"passed: {what}: logprobs equal to {worst:.1g} nats"


def _free_memory() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check", description=__doc__, epilog=f"example: {EXAMPLE}"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        default=Path("models/embedded"),
        help="whose shape and tokenizer are taken (default %(default)s)",
    )
    model: Path = parser.parse_args().model
    if not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here; the tests run the same comparisons on a CPU (scripts/test.sh)")
    if not (model / "config.json").is_file():
        raise ValueError(f"model {model}: no config.json; is it a Hugging Face model folder?")
    for line in check_gpu(model):
        print(line)


if __name__ == "__main__":
    run_main(main)
