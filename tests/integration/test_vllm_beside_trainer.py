"""vLLM and the trainer do not disturb each other, whoever starts first, in one process and in two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.requirements import require
from tests.rollouts.tiny_llama import save_llama


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("order", ["trainer_first", "engine_first"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_is_trained_beside_an_engine(processes: int, order: str, tmp_path: Path) -> None:
    require("vllm")
    folder = save_llama(tmp_path, seed=0)
    # With --cpu, accelerate launches one process whatever --num_processes says; this form launches as many as asked.
    several = ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else ["--cpu"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *several, "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", str(processes)]
    worker = ["-m", "tests.integration.vllm_beside_trainer", str(folder), order]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*launch, *worker], stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):  # whoever of the launched processes is left
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, log.read_text()[-3000:]
