"""Export a run's model: merged weights, tokenizer, chat template, a model card, and the command that serves it."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from scripts.console import run_main
from train.export import export_model
from train.model import DTYPES

EXAMPLE = "python -m scripts.export_model runs/quickstart/grpo --output exported"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.export_model", description=__doc__, epilog=f"example: {EXAMPLE}"
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run folder (its best, final or newest weights), or one model folder",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="what weights are stored in (default bfloat16)"
    )
    arguments = parser.parse_args()
    disable_progress_bar()
    exported = export_model(arguments.run, arguments.output, dtype=arguments.dtype)
    print(f"export: {exported.source} is in {exported.folder} ({arguments.dtype}); serve it with\n{exported.serve}")


if __name__ == "__main__":
    run_main(main)
