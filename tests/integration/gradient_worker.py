"""Run by accelerate launch in one or more processes: the gradient of fixed samples, saved by process 0.

ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 -m tests.integration.gradient_worker OUTPUT dapo
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator

from tests.random_samples import random_samples, tiny_model
from train.config import GrpoConfig, OptimizerConfig
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
        pad_token_id=1,
        reference=tiny_model(seed=1).eval(),
    )
    # An odd number of micro-batches: one process has less to do than the other, and must still take part.
    batches = learner.pack(random_samples(5, advantages=[1.0, -1.0, 0.5, 2.0, -0.5]))
    assert len(batches) % 2 == 1, len(batches)
    metrics = learner.gradient(batches)
    if accelerator.is_main_process:
        gradients = {name: parameter.grad for name, parameter in learner.model.named_parameters()}
        torch.save({"gradients": gradients, "metrics": metrics, "processes": accelerator.num_processes}, output)


if __name__ == "__main__":
    main()
