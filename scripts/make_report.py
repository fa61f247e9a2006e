"""Write the page of a run, finished or not: one offline HTML file. Several runs are compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.console import run_main
from train.report.page import write_page
from train.report.report import render_report
from train.report.run_data import load_runs

EXAMPLE = "python -m scripts.make_report runs/quickstart"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.make_report", description=__doc__, epilog=f"example: {EXAMPLE}"
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--output", type=Path, metavar="F", help="the file to write (default: report.html in the first run folder)"
    )
    arguments = parser.parse_args()
    output: Path = arguments.output or arguments.runs[0] / "report.html"
    runs = load_runs(arguments.runs)
    write_page(output, render_report(runs))
    print(f"report: {output}")
    for run in runs:
        for note in run.notes:
            print(f"note on {run.name}: {note}")


if __name__ == "__main__":
    run_main(main)
