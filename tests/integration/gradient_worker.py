"""Run by accelerate launch in one or more processes: the gradient of fixed samples, saved by process 0.

ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 -m tests.integration.gradient_worker OUTPUT dapo
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator

from tests.random_samples import random_samples, tiny_model
from train.config import GrpoConfig, OptimizerConfig
from train.grpo import leave_together
from train.learner import Learner


def main() -> None:
    output, loss_type = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    learner = Learner(
        tiny_model(),
        accelerator,
        config=GrpoConfig(loss_type=loss_type, beta=0.1, max_micro_batch_tokens=100),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(),
        temperature=0.7,
        reference=tiny_model(seed=1).eval(),
    )
    results: dict[str, Any] = {"processes": accelerator.num_processes}
    # Of one sample only one process has something to do, and the other must still take part.
    for count in (5, 1):
        batches = learner.pack(random_samples(count, advantages=[1.0, -1.0, 0.5, 2.0, -0.5][:count]))
        assert len(batches) % accelerator.num_processes == 0, len(batches)
        metrics = learner.gradient(batches)
        gradients = {name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None}
        results[f"{count} samples"] = {"gradients": gradients, "metrics": metrics}
    if accelerator.is_main_process:
        torch.save(results, output)
    leave_together(accelerator)


if __name__ == "__main__":
    main()
