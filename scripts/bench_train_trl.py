"""The peer of the train benchmark: `trl.GRPOTrainer`, given the same samples through `rollout_func`.

Its step is taken from where it begins to where the optimizer has updated, so it holds what TRL does with a batch:
padding, rewards, advantages, logprobs, loss, backward, clip, update. Chosen in TRL's favour: nothing is generated,
there is no reference model and no logging, and the old logprobs need no forward pass of their own. Its head is computed
in tiles either way; `trl_compact` also leaves out what is no completion, which TRL does on CUDA only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from data.types import TrainingSample
from scripts.bench_train_shape import GROUP, REWARDS


def trl_steps(
    model: Any, steps: Sequence[Sequence[TrainingSample]], meter: Any, options: dict[str, Any], folder: Path
) -> None:
    """One optimizer step of TRL's trainer for each list of samples, measured by `meter`."""
    import trl.trainer.utils
    from trl import GRPOConfig, GRPOTrainer

    if options["contender"] == "trl_compact":
        trl.trainer.utils._use_triton = lambda device: True  # here it decides what is scored, and nothing else
    waiting = list(steps)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        samples = waiting.pop(0)
        assert len(prompts) == len(samples)
        firsts = [sample.loss_mask.index(True) for sample in samples]
        rows = list(zip(samples, firsts, strict=True))
        return {
            "prompt_ids": [list(sample.token_ids[:n]) for sample, n in rows],
            "completion_ids": [list(sample.token_ids[n:]) for sample, n in rows],
            "logprobs": [list(sample.sampled_logprobs[n:]) for sample, n in rows],
            "env_mask": [[int(trained) for trained in sample.loss_mask[n:]] for sample, n in rows],
        }

    class Measure(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end()

    arguments = GRPOConfig(
        output_dir=str(folder), num_generations=GROUP, per_device_train_batch_size=options["micro_batch"],
        gradient_accumulation_steps=GROUP // options["micro_batch"], max_steps=len(steps), beta=0.0,
        max_completion_length=max(len(sample) for sample in steps[-1]), shuffle_dataset=False, report_to="none",
        use_cpu=not torch.cuda.is_available(), bf16=options["dtype"] == "bfloat16", save_strategy="no",
        logging_strategy="no", gradient_checkpointing=options["gradient_checkpointing"], loss_type="dapo",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: list(REWARDS),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(steps))]}),
            processing_class=AutoTokenizer.from_pretrained("models/embedded"),
            rollout_func=rollout,
            callbacks=[Measure()],
        )
        trainer.train()
