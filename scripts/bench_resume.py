"""Does a killed run lose, repeat or change anything? Small real runs are killed at random moments and started again.

Each run trains a random model with the transformers engine and is killed with SIGKILL until it ends by itself. Then its
steps, the groups that they trained, its ledger and what it published are looked at, and without staleness its weights
are compared with those of a run that nobody killed. Runs are forked from one process, so that a start takes what a run
takes and not what importing takes.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

from data.gate import GateError, check_batch
from data.jsonl import read_lines
from data.ledger import read_ledger
from data.rows import SAMPLE
from scripts.bench_resume_run import save_small_model, small_run
from scripts.console import progress
from train.metrics import read_metrics

_STALENESS = (0, 0, 0, 2)
"""Of the runs, one after the other."""


def resume(*, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Kill runs of `steps` steps `kills` times in all; the last of them is left to end."""
    rng = random.Random(seed)
    torch.set_num_threads(1)  # before any thread is there that a fork would not have
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="agentgrad-") as name, progress() as bar:
        folder = Path(name)
        model = save_small_model(folder / "model")
        started = time.perf_counter()
        _wait(_start(model, folder / "whole", steps, 0))
        whole_s = time.perf_counter() - started
        expected = load_file(folder / "whole" / "final" / "model.safetensors")
        place = bar.add_task("kills", total=kills, note="")
        counts: Counter[str] = Counter()
        faults: list[str] = []
        difference = 0.0
        while counts["kills"] < kills:
            staleness = _STALENESS[counts["runs"] % len(_STALENESS)]
            run = folder / f"run-{counts['runs']}"
            counts += _kill_and_continue(
                model, run, steps, staleness, kills - counts["kills"], 0.6 * whole_s, rng, bar, place
            )
            faults += [f"{run.name}: {fault}" for fault in run_faults(run, steps)]
            if staleness == 0:
                gap = _difference(expected, load_file(run / "final" / "model.safetensors"))
                difference = max(difference, gap)
                counts["runs_compared"] += 1
                counts["runs_equal"] += gap == 0.0
    return {
        "benchmark": "resume",
        "seed": seed,
        "steps": steps,
        "whole_run_s": round(whole_s, 2),
        **counts,
        "largest_weight_difference": difference,
        "faults": faults,
        "passed": not faults and counts["runs_equal"] == counts["runs_compared"],
    }


def run_faults(folder: Path, steps: int) -> list[str]:
    """What is wrong with the record of a run that has ended: each step once, each group trained or replaced once, every
    sampled token accounted for once, nothing published twice in one life and nothing left out."""
    faults: list[str] = []
    rows = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    if rows != list(range(1, steps + 1)):
        faults.append(f"metrics.jsonl has the steps {rows}")
    samples = [
        sample for path in sorted((folder / "samples").glob("step-*.jsonl")) for sample in read_lines(path, SAMPLE)
    ]
    trained = Counter(
        group
        for path in sorted((folder / "samples").glob("step-*.jsonl"))
        for group in {sample.trajectory_id.split("/")[0] for sample in read_lines(path, SAMPLE)}
    )
    if set(trained) != {f"group-{index}" for index in range(len(trained))} or set(trained.values()) != {1}:
        faults.append(f"groups in the steps' samples: {dict(trained)}")
    try:
        check_batch(samples, read_ledger(folder / "ledger" / "completions.jsonl"))
    except GateError as error:
        faults.append(str(error))
    published = [json.loads(line)["step"] for line in (folder / "published.jsonl").read_text().splitlines()]
    if sorted(set(published)) != list(range(1, steps + 1)):
        faults.append(f"published steps: {published}")
    return faults


def _kill_and_continue(
    model: Path,
    run: Path,
    steps: int,
    staleness: int,
    kills: int,
    longest_s: float,
    rng: random.Random,
    bar: Progress,
    place: TaskID,
) -> Counter[str]:
    """Start a run until it has ended, and kill it meanwhile as often as `kills` allows."""
    counts: Counter[str] = Counter(runs=1)
    while not (run / "final").exists():
        process = _start(model, run, steps, staleness)
        if counts["kills"] < kills:
            process.join(timeout=rng.uniform(0.0, longest_s))
        if counts["kills"] < kills and process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            counts["kills"] += 1
            counts["kills_in_a_checkpoint"] += any(run.glob("checkpoints/.*.partial"))
            counts["kills_before_a_checkpoint"] += not any(run.glob("checkpoints/step-*"))
            bar.update(place, advance=1)
        else:
            _wait(process)
    return counts


class _Published:
    """What Weights & Biases would be told, in a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, data: dict[str, Any], step: int) -> None:
        self._file.write(json.dumps({"step": step}) + "\n")
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def _start(model: Path, folder: Path, steps: int, staleness: int) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_run, args=(model, folder, steps, staleness))
    process.start()
    return process


def _run(model: Path, folder: Path, steps: int, staleness: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = _Published(folder / "published.jsonl")
    asyncio.run(small_run(str(model), folder, "transformers", steps, max_staleness=staleness, run=run))


def _wait(process: BaseProcess) -> None:
    process.join()
    if process.exitcode != 0:
        print(f"a run ended with exit code {process.exitcode}; its message is above", file=sys.stderr)
        raise ValueError(f"a run that nobody killed ended with exit code {process.exitcode}")


def _difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    assert expected.keys() == got.keys()
    return max((expected[name] - got[name]).abs().max().item() for name in expected)
