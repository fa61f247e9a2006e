"""Check packed samples against the ledger of their run, as the trainer does before each step: exit code 0 when they are
exactly what the policy sampled, 1 and the reason for the first violation otherwise."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import islice
from pathlib import Path

from data.gate import check_batch
from data.jsonl import read_lines, torn_bytes
from data.ledger import read_ledger
from data.rows import SAMPLE
from data.types import Excluded, TrainingSample
from rollouts.record import read_trajectories
from scripts.console import run_main, say_torn
from train.report.sources import file_kind

EXAMPLE = "python -m scripts.check_samples runs/quickstart/grpo/samples/step-000001.jsonl"
_LEDGER = Path("ledger") / "completions.jsonl"
_LEVELS_UP = 3


def check_samples(path: Path, ledger: Path | None = None) -> str:
    """Check a dump; returns the line of result.

    Raises:
        GateError: the first violation.
        ValueError: the file holds no samples or is cut off, or there is no ledger.
    """
    if ledger is not None and not ledger.is_file():
        what = "is a folder" if ledger.is_dir() else "no such file"
        raise ValueError(f"--ledger {ledger}: {what}; name the file; a run has it in {_LEDGER}")
    kind = file_kind(path)
    if kind != "samples":
        raise ValueError(f"{path} holds {kind}, not packed samples; a run writes those to samples/step-NNNNNN.jsonl")
    _check_whole(path)
    samples = list(read_lines(path, SAMPLE))
    groups = {sample.trajectory_id.rpartition("/")[0] for sample in samples} | _groups_of_step(path)
    ledger = ledger or _find_ledger(path)
    say_torn(ledger)  # its writer may have been killed after these samples were written
    report = check_batch(samples, read_ledger(ledger, groups=groups))
    return _line(samples, report.trained, report.excluded)


def _groups_of_step(path: Path) -> set[str]:
    """Those that the run recorded for the step of a dump: one that is missing in the dump as a whole is found too."""
    recorded = path.resolve().parent.parent / "trajectories" / path.name
    if not recorded.is_file():
        return set()
    _check_whole(recorded)
    return {trajectory.group_id for trajectory in read_trajectories(recorded)}


def _check_whole(path: Path) -> None:
    """The gate would call it a fault of the training, that rows are missing."""
    if torn := torn_bytes(path):
        raise ValueError(
            f"{path}: the last line is cut off ({torn} bytes of it are there), so the step is not there as a whole; "
            "copy the file again"
        )


def _find_ledger(path: Path) -> Path:
    """The ledger of the run folder above a dump."""
    for folder in islice(path.resolve().parents, _LEVELS_UP):
        if (folder / _LEDGER).is_file():
            return folder / _LEDGER
    raise ValueError(f"{path}: no run folder with {_LEDGER} above it; name the ledger with --ledger F")


def _line(samples: list[TrainingSample], trained: int, excluded: Counter[Excluded]) -> str:
    left_out = ", ".join(f"{count} left out ({reason.value})" for reason, count in excluded.most_common())
    tokens = sum(len(sample) for sample in samples)
    return (
        f"passed: {len(samples)} samples, {tokens} tokens; of the {trained + excluded.total()} sampled ones "
        f"{trained} are trained, {left_out or 'none is left out'}; ids, logprobs and versions equal the ledger's"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.check_samples", description=__doc__, epilog=f"example: {EXAMPLE}"
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="packed samples (JSONL)")
    parser.add_argument(
        "--ledger", type=Path, metavar="F", help="the run's ledger (default: found in the run folder above PATH)"
    )
    arguments = parser.parse_args()
    print(check_samples(arguments.path, arguments.ledger))


if __name__ == "__main__":
    run_main(main)
