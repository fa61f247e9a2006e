"""Show loss masks: who wrote each token, whether it is trained, and why. In the terminal, or as one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from scripts.console import run_main, say_torn
from train.report.mask_page import render_mask_page
from train.report.page import write_page
from train.report.sources import file_kind, load_views
from train.report.terminal import print_masks

EXAMPLE = "python -m scripts.view_masks runs/quickstart/grpo/samples/step-000001.jsonl --html masks.html"


def main() -> None:
    arguments = _parser().parse_args()
    path: Path = arguments.path
    if arguments.limit < 1:
        raise ValueError("--limit must be at least 1")
    if file_kind(path) != "demonstrations":  # of those, a last line without its newline is read
        say_torn(path)
    loaded = load_views(path, arguments.model, limit=arguments.limit, config=arguments.config)
    if loaded.written_by is not None:
        print(f"masks: {loaded.written_by}", file=sys.stderr)
    title = str(Path(*path.parts[-2:]))
    if arguments.html is None:
        print_masks(Console(highlight=False), loaded.views, title=title, rows=loaded.rows)
        return
    write_page(arguments.html, render_mask_page(loaded.views, title=title, rows=loaded.rows))
    print(f"{len(loaded.views)} of {loaded.rows} rows are in {arguments.html}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.view_masks", description=__doc__, epilog=f"example: {EXAMPLE}"
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="packed samples or trajectories of a run, or demonstrations (JSONL; told by content)",
    )
    parser.add_argument("--html", type=Path, metavar="F", help="write a page instead of printing")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="whose tokens these are (default: the run folder's newest checkpoint)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="F",
        help="whose [renderer] writes demonstrations (default: config.toml of the run that made the model)",
    )
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="how many rows to show (%(default)s)")
    return parser


if __name__ == "__main__":
    run_main(main)
