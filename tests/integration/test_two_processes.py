"""One process or two: the gradient and the metrics of a step are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def gradient_with(processes: int, loss_type: str, folder: Path) -> dict[str, Any]:
    output = folder / f"{processes}.pt"
    # With --cpu, accelerate launches one process whatever --num_processes says; this form launches as many as asked.
    several = ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else ["--cpu"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *several, "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", str(processes)]
    worker = ["-m", "tests.integration.gradient_worker", str(output), loss_type]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *worker], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(output, weights_only=True)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "rloo"])
def test_the_gradient_does_not_depend_on_the_number_of_processes(loss_type: str, tmp_path: Path) -> None:
    one, two = (gradient_with(processes, loss_type, tmp_path) for processes in (1, 2))
    assert (one["processes"], two["processes"]) == (1, 2)
    for step in ("5 samples", "1 samples"):
        for name, gradient in one[step]["gradients"].items():
            assert gradient.abs().max() > 0
            torch.testing.assert_close(two[step]["gradients"][name], gradient, atol=1e-6, rtol=1e-5)
        assert two[step]["metrics"] == pytest.approx(one[step]["metrics"], abs=1e-5)
