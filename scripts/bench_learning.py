"""Does a model learn? The quickstart for several seeds: held-out success before and after GRPO."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from scripts.quickstart import fastest_sandbox, quickstart
from train.report.evaluations import read_evaluation


def learning(folder: Path, seeds: list[int]) -> dict[str, Any]:
    """Run the quickstart once for each seed, and compare the evaluations of its stages.

    Raises:
        ValueError: there is a run already: what it would skip would be neither timed nor of this code.
    """
    for seed in seeds:
        if (folder / f"seed-{seed}").exists():
            raise ValueError(f"{folder / f'seed-{seed}'} is there already; delete it, or choose another --output_dir")
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        started = time.perf_counter()
        run = folder / f"seed-{seed}"
        quickstart(run, configs="quickstart", seed=seed, sandbox=fastest_sandbox())
        wall_s = time.perf_counter() - started
        results = {
            stage: read_evaluation(run / "eval" / f"{stage}.json").evaluation for stage in ("base", "sft", "grpo")
        }
        row: dict[str, Any] = {"seed": seed, "wall_s": round(wall_s, 1)}
        for stage, result in results.items():
            row |= {
                f"{stage}_success": round(result.success, 4),
                f"{stage}_stderr": round(result.success_stderr, 4),
                f"{stage}_pass@8": _rounded(result.pass_at_k.get(8)),
                f"{stage}_pass^8": _rounded(result.pass_hat_k.get(8)),
            }
        row["gain_points"] = round(100 * (results["grpo"].success - results["sft"].success), 1)
        runs.append(row)
        print(json.dumps(row), flush=True)
    return {"benchmark": "learning", "runs": runs, "least_gain_points": min(run["gain_points"] for run in runs)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
