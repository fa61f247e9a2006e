"""A warm start in processes of its own: `accelerate launch -m tests.train.sft_child FOLDER KILL_AT`.

FOLDER holds `model` and `data.jsonl`; the run goes to FOLDER/run. Process 0 kills itself, as the machine would, when
step KILL_AT has written its row (0: never).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.config import RendererConfig
from train.config import CheckpointConfig, OptimizerConfig, SftConfig, WandbConfig
from train.sft import run_sft

STEPS = 8


def sft(folder: Path, output: Path, *, kill_at: int = 0, processes: int = 1, **changes: Any) -> Path:
    """The run of these tests: 8 steps of 8 rows, a checkpoint every 2 steps."""

    def on_step(row: Mapping[str, Any], steps: int) -> None:
        if row["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return run_sft(
        model_path=str(folder / "model"),
        output_dir=output,
        seed=3,
        config=SftConfig(
            **{"data": str(folder / "data.jsonl"), "per_device_train_batch_size": 8 // processes, "max_steps": STEPS}
            | changes
        ),
        renderer_config=RendererConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1),
        checkpoint=CheckpointConfig(save_steps=2),
        wandb=WandbConfig(mode="disabled"),
        on_step=on_step,
    )


if __name__ == "__main__":
    sft(Path(sys.argv[1]), Path(sys.argv[1]) / "run", kill_at=int(sys.argv[2]), processes=int(os.environ["WORLD_SIZE"]))
