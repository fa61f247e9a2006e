"""Training again from the samples that a run dumped, without an engine: to debug an update, or to time it alone.

From the same weights, with the same configuration, the updates are those of the run: a dump is in the order in which
the run shared its samples out. The gate stands before every step here too, with the ledger of that run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data.gate import GateError
from data.jsonl import read_lines
from data.ledger import read_ledger
from data.rows import SAMPLE
from train.config import GrpoConfig
from train.learner import Learner
from train.metrics import MetricsLog
from train.step_samples import check_updates, mini_batches, packed_samples


def dumped_steps(run: Path) -> list[Path]:
    """The samples of a run's steps, in order.

    Raises:
        ValueError: it has none.
    """
    steps = sorted((run / "samples").glob("step-*.jsonl"))
    if not steps:
        raise ValueError(f"replay: {run} has no samples/step-NNNNNN.jsonl; name the folder of a GRPO run")
    return steps


def replay(
    run: Path,
    learner: Learner,
    config: GrpoConfig,
    *,
    log: MetricsLog | None,
    on_step: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> int:
    """Make the updates of the first `config.max_steps` dumped steps; returns how many there were.

    Raises:
        ValueError: there is no dump, or a line of it is no sample.
        GateError: a step is not what that run's policy sampled.
    """
    steps = dumped_steps(run)[: config.max_steps]
    for step, path in enumerate(steps, start=1):
        samples = list(read_lines(path, SAMPLE))
        groups = {sample.trajectory_id.rpartition("/")[0] for sample in samples}
        updates = [learner.pack(part) for part in mini_batches(samples, config.num_mini_batches)]
        updates = [batches for batches in updates if batches]
        ledger = read_ledger(run / "ledger" / "completions.jsonl", groups=groups)
        try:
            check_updates(updates, packed_samples(updates, samples), ledger)
        except GateError as error:
            raise GateError(f"{path}: {error}") from error
        started = time.perf_counter()
        row: dict[str, Any] = {"step": step, "tokens/trained": sum(sum(sample.loss_mask) for sample in samples)}
        if updates:
            row |= learner.update_step(updates)
        learner.end_step()
        row["time/update_s"] = time.perf_counter() - started
        if log is not None:
            log.write(row)
            log.publish()
        on_step(row)
    return len(steps)
