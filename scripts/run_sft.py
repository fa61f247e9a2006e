"""Warm a model folder up on demonstrations. Started again with the same configuration, a run continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from scripts.console import CONTINUES, progress, run_main
from scripts.run_folder import only_writer
from scripts.settings import SftSettings, load_settings, save_resolved
from train.sft import run_sft

LINE_EVERY_STEPS = 20


def main() -> None:
    settings = load_settings(SftSettings)
    folder = Path(settings.output_dir)
    is_main = int(os.environ.get("RANK", "0")) == 0
    with only_writer(folder) if is_main else nullcontext():
        if is_main:
            save_resolved(settings, folder)
        final = _train(settings, folder, is_main=is_main)
    if is_main:
        print(f"sft: the model is in {final}")


def _train(settings: SftSettings, folder: Path, *, is_main: bool) -> Path:
    # The bars that transformers draws for each file it reads or writes would tear ours.
    disable_progress_bar()
    bar = progress()
    bar.disable = not is_main
    with bar:
        place = bar.add_task("steps", total=None, note="")

        def on_step(row: Mapping[str, Any], steps: int) -> None:
            bar.update(place, total=steps, completed=row["step"], note=f"loss {row['loss']:.3f}")
            if row["step"] % LINE_EVERY_STEPS == 0 or row["step"] == steps:
                bar.console.print(step_line(row, steps), highlight=False, soft_wrap=True)

        return run_sft(
            model_path=settings.model,
            output_dir=folder,
            seed=settings.seed,
            config=settings.sft,
            renderer_config=settings.renderer,
            optimizer=settings.optimizer,
            checkpoint=settings.checkpoint,
            wandb=settings.wandb,
            on_step=on_step,
        )


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """One line for the log and the terminal."""
    return (
        f"step {row['step']}/{steps}: loss {row['loss']:.3f}, {100 * row['mean_token_accuracy']:.0f} % right, "
        f"{row['tokens/trained']} of {row['tokens/total']} tokens trained, {row['time/step_s']:.2f} s"
    )


if __name__ == "__main__":
    run_main(main, again=CONTINUES)
