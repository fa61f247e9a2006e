"""TRL's trainers as the reference: made once for a test, driven on samples of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from data.types import TrainingSample
from tests.random_samples import tiny_model
from train.config import GrpoConfig, OptimizerConfig
from train.learner import Learner

MAX_TRAJECTORY_TOKENS = 128


def make_learner(model: Any, config: GrpoConfig, *, temperature: float, reference: Any = None) -> Learner:
    return Learner(
        model,
        Accelerator(cpu=True),
        config=config,
        optimizer=OptimizerConfig(),
        temperature=temperature,
        max_trajectory_tokens=MAX_TRAJECTORY_TOKENS,
        reference=reference,
    )


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4, f"{name}: TRL's gradient is zero, nothing is compared"
        torch.testing.assert_close(
            found[name], gradient, atol=1e-5 * max(largest, 1.0), rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def moved_model(seed: int, by: float) -> LlamaForCausalLM:
    """The tiny model with all weights moved at random: near it, and another policy."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@torch.no_grad()
def all_logprobs(model: Any, sample: TrainingSample, *, temperature: float) -> Tensor:
    """The logprob of each token of the sample `[L]` from whole logits, the sample alone; 0 at the first."""
    ids = torch.tensor([sample.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
    return torch.cat([torch.zeros(1), torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]])


def make_trainer(
    kind: str,
    folder: Path,
    *,
    rewards: Sequence[float],
    rollout: Callable[..., Any],
    reference: LlamaForCausalLM | None = None,
    **options: Any,
) -> Any:
    """`trl.GRPOTrainer` or `trl.RLOOTrainer` on the CPU, with the tiny model and a batch of eight samples in two."""
    import trl

    arguments: dict[str, Any] = {
        "output_dir": str(folder), "num_generations": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "max_completion_length": MAX_TRAJECTORY_TOKENS, "max_steps": 1,
        "max_grad_norm": 0.0, "beta": 0.0, "shuffle_dataset": False, "report_to": "none", "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    model = tiny_model()
    if reference is not None:
        # TRL loads the reference from where the model's configuration says that it came from.
        reference.save_pretrained(folder / "reference")
        model.config._name_or_path = str(folder / "reference")
    of_kind: dict[str, Any] = {"rollout_func": rollout} if kind == "GRPO" else {}
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=lambda completions, **_: list(rewards),
        args=getattr(trl, f"{kind}Config")(**(arguments | options)),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=AutoTokenizer.from_pretrained("models/embedded"),
        **of_kind,
    )


def prompt_lengths(samples: Sequence[TrainingSample]) -> list[int]:
    return [sample.loss_mask.index(True) for sample in samples]


def rollout_of(samples: Sequence[TrainingSample]) -> Callable[..., dict[str, Any]]:
    """A `rollout_func` that gives these samples, with tool tokens masked."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rows = list(zip(samples, prompt_lengths(samples), strict=True))
        return {
            "prompt_ids": [list(sample.token_ids[:n]) for sample, n in rows],
            "completion_ids": [list(sample.token_ids[n:]) for sample, n in rows],
            "logprobs": [list(sample.sampled_logprobs[n:]) for sample, n in rows],
            "env_mask": [[int(trained) for trained in sample.loss_mask[n:]] for sample, n in rows],
        }

    return rollout


def trl_inputs(samples: Sequence[TrainingSample], columns: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """What TRL's `_compute_loss` takes: prompts padded on the left, completions on the right; `columns` are per token
    `[L]` of each sample, and are cut to the completions."""
    from torch.nn.utils.rnn import pad_sequence

    lengths = prompt_lengths(samples)
    ids = [torch.tensor(sample.token_ids) for sample in samples]

    def padded(rows: Sequence[Tensor], side: str = "right") -> Tensor:
        return pad_sequence(list(rows), batch_first=True, padding_value=0, padding_side=side)

    completions = {
        "completion_ids": ids,
        "completion_mask": [torch.ones_like(row) for row in ids],
        "tool_mask": [torch.tensor(sample.loss_mask).long() for sample in samples],
        **columns,
    }
    cut = {name: padded([row[n:] for row, n in zip(rows, lengths, strict=True)]) for name, rows in completions.items()}
    prompts = [row[:n] for row, n in zip(ids, lengths, strict=True)]
    return cut | {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(row) for row in prompts], "left"),
        "advantages": torch.tensor([sample.advantages[n] for sample, n in zip(samples, lengths, strict=True)]),
        "num_items_in_batch": torch.tensor(float(sum(sum(sample.loss_mask) for sample in samples))),
    }
