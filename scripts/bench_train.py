"""How long does an update take, and how much memory? Against TRL's trainer, and against the least that it can take.

Contenders, each in a process of its own (`bench_train_run`), in turns, with the same micro-batches, type and
checkpointing:

- `ours`: packing, forward, loss, backward, clip, AdamW.
- `ours_unshared`: the same, with prompts that differ in their first token, so that nothing is shared.
- `bare`: forward and backward of the body over our packed tokens; no head, no loss, no update.
- `trl`, `trl_compact`: see `bench_train_trl`. On a CPU TRL scores every position and attends over padding with a mask,
  while on CUDA it scores completions alone: a ratio against `trl` from a CPU flatters, so the better of the two counts.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from scripts.bench_train_shape import GROUP, MODELS, make_group

CONTENDERS = ("ours", "ours_unshared", "bare", "trl", "trl_compact")
MAX_BARE_RATIO = 1.25
MAX_MEMORY_RATIO = 0.5
TIMEOUT_S = 1800.0


def train(
    *,
    models: Sequence[str] = MODELS,
    repeats: int = 3,
    steps: int = 2,
    micro_batch: int = 4,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure everything; the result is what the last line of output shows. Speed never fails a run.

    Args:
        repeats: processes of each contender.
        steps: timed steps in each of them.
        micro_batch: trajectories in a micro-batch; ours takes as many tokens as these have at most.

    Raises:
        ValueError: a contender failed; it says how.
    """
    began, load = time.perf_counter(), round(os.getloadavg()[0], 1)
    # A group of full length takes the bare pass of the embedded model 46 s on two cores.
    scale = 1.0 if torch.cuda.is_available() else 0.25
    rows: dict[str, dict[str, Any]] = {}
    for model in models:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
        for repeat in range(repeats):
            for name in CONTENDERS[repeat % 2 * 2 :] + CONTENDERS[: repeat % 2 * 2]:
                options = {
                    "contender": name, "model": model, "scale": scale, "seed": seed, "steps": steps, "dtype": dtype,
                    "micro_batch": micro_batch, "gradient_checkpointing": gradient_checkpointing,
                }  # fmt: skip
                runs[name].append(_child(options))
        rows[model] = _summary(runs)
        for name, row in rows[model]["contenders"].items():
            figures = f"{row['step_s']:8.3f} s {row['step_cpu_s']:8.3f} s of processors {row['peak_mib']:9.1f} MiB"
            print(f"{model:<9} {name:<14} {figures} above static", flush=True)
        print(f"{model:<9} {rows[model]['ratios']}", flush=True)
    samples = make_group(scale, seed=seed, vocabulary=700)
    return {
        "benchmark": "train",
        "models": rows,
        "targets_met": {model: row["targets_met"] for model, row in rows.items()},
        "note": "on a CPU TRL scores every position, so its ratios flatter ours; trl_compact scores completions alone",
        "work": {
            "trajectories": GROUP,
            "tokens": sum(len(sample) for sample in samples),
            "trained": sum(sum(sample.loss_mask) for sample in samples),
            "scale": scale,
        },
        "options": {
            "repeats": repeats, "steps": steps, "micro_batch": micro_batch, "dtype": dtype, "seed": seed,
            "gradient_checkpointing": gradient_checkpointing,
        },
        "machine": {"cpus": os.cpu_count(), "load_before": load, "python": platform.python_version()},
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")},
        "wall_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def _child(options: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.bench_train_run", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise ValueError(f"{options['contender']} on {options['model']} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of each contender, their ratios, and which targets are met."""
    contenders: dict[str, dict[str, Any]] = {}
    for name, rows in runs.items():
        seconds, cpu_seconds = ([s for row in rows for s in row[kind]] for kind in ("seconds", "cpu_seconds"))
        contenders[name] = {
            "step_s": round(statistics.median(seconds), 4),
            "step_s_min": round(min(seconds), 4),
            "step_cpu_s": round(statistics.median(cpu_seconds), 4),
            "peak_mib": round(statistics.median(row["peak_bytes"] for row in rows) / 2**20, 2),
            "largest_micro_batch_tokens": rows[0]["largest_micro_batch_tokens"],
        }
    best = {
        key: min(contenders[name][key] for name in ("trl", "trl_compact"))
        for key in ("step_s", "step_cpu_s", "peak_mib")
    }
    ours = contenders["ours"]
    ratios = {
        "cpu_time_over_bare": round(ours["step_cpu_s"] / contenders["bare"]["step_cpu_s"], 3),
        "cpu_time_over_trl": round(ours["step_cpu_s"] / best["step_cpu_s"], 3),
        "cpu_time_over_unshared": round(ours["step_cpu_s"] / contenders["ours_unshared"]["step_cpu_s"], 3),
        "time_over_bare": round(ours["step_s"] / contenders["bare"]["step_s"], 3),
        "time_over_trl": round(ours["step_s"] / best["step_s"], 3),
        "memory_over_trl": round(ours["peak_mib"] / best["peak_mib"], 3),
        "memory_over_bare": round(ours["peak_mib"] / contenders["bare"]["peak_mib"], 3),
        "time_over_unshared": round(ours["step_s"] / contenders["ours_unshared"]["step_s"], 3),
        "memory_over_unshared": round(ours["peak_mib"] / contenders["ours_unshared"]["peak_mib"], 3),
    }
    met = {
        "at most 1.25 times the bare pass": ratios["time_over_bare"] <= MAX_BARE_RATIO,
        "faster than TRL": ratios["time_over_trl"] < 1.0,
        "at most half of TRL's memory": ratios["memory_over_trl"] <= MAX_MEMORY_RATIO,
    }
    return {"contenders": contenders, "ratios": ratios, "targets_met": met}
