"""One contender of the train benchmark, in a process of its own: what it holds at its peak is then its own.

    python -m scripts.bench_train_run '{"contender": "ours", "model": "embedded", "scale": 0.25, ...}'

A first, short step makes everything that is made once. In the second, memory is measured: the static state is what the
process holds before it (weights and optimizer), plus the gradients where they are not there yet; the peak is the
largest resident set during it (on a CPU, from /proc; the C library gives freed memory back at once meanwhile, so that
what it keeps for later is nobody's), or what torch's allocator says on CUDA. The steps after it are timed: on the
clock, and in processor time, which says more where others use the machine.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator

from data.collator import MicroBatch
from data.types import TrainingSample
from scripts.bench_train_shape import make_group, make_model
from train.config import GrpoConfig, OptimizerConfig
from train.learner import Learner
from train.model import computing, hidden_states

WARM_UP_SCALE = 0.02
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)


@dataclass(slots=True)
class Meter:
    """Bytes of the second step and seconds of those after it: call `begin` before each step and `end` after it."""

    model: Any
    begun: int = 0
    static: int = 0
    started: tuple[float, float] = (0.0, 0.0)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def begin(self) -> None:
        self.begun += 1
        missing = sum(
            p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad and p.grad is None
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.static = torch.cuda.memory_allocated() + missing
        else:
            c_library = ctypes.CDLL("libc.so.6")
            c_library.mallopt(_MMAP_THRESHOLD, 2**16 if self.begun == 2 else 2**25)
            c_library.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            self.static = _resident("VmRSS") + missing
        self.started = time.perf_counter(), time.process_time()

    def end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.begun == 2:
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident("VmHWM")
            self.peak_bytes = peak - self.static
        if self.begun > 2:
            self.seconds.append(time.perf_counter() - self.started[0])
            self.cpu_seconds.append(time.process_time() - self.started[1])


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each timed step, the peak above static, and the most tokens that a micro-batch computed."""
    model = make_model(options["model"])
    vocabulary = model.config.vocab_size
    shared = options["contender"] != "ours_unshared"
    warm_up = make_group(WARM_UP_SCALE, seed=1, vocabulary=vocabulary, shared=shared)
    samples = make_group(options["scale"], seed=options["seed"], vocabulary=vocabulary, shared=shared)
    steps = [warm_up, *[samples] * (1 + options["steps"])]
    meter = Meter(model)
    if options["contender"].startswith("trl"):
        from scripts.bench_train_trl import trl_steps

        with TemporaryDirectory(prefix="bench-") as folder:
            trl_steps(model, steps, meter, options, Path(folder))
        tokens = options["micro_batch"] * max(len(sample) for sample in samples)
    else:
        tokens = _our_steps(model, steps, meter, options)
    return {
        "seconds": meter.seconds,
        "cpu_seconds": meter.cpu_seconds,
        "peak_bytes": meter.peak_bytes,
        "largest_micro_batch_tokens": tokens,
    }


def _our_steps(model: Any, steps: Sequence[list[TrainingSample]], meter: Meter, options: dict[str, Any]) -> int:
    """Ours, or the bare body on our micro-batches; returns the most tokens that one of them computed."""
    longest = max(len(sample) for sample in steps[-1])
    learner = Learner(
        model.to(Accelerator(cpu=not torch.cuda.is_available()).device).train(),
        Accelerator(cpu=not torch.cuda.is_available()),
        config=GrpoConfig(
            max_micro_batch_tokens=options["micro_batch"] * longest,
            gradient_checkpointing=options["gradient_checkpointing"],
            dtype=options["dtype"],
        ),
        optimizer=OptimizerConfig(),
        temperature=1.0,
    )
    bare = options["contender"] == "bare"
    step: Callable[[list[MicroBatch]], Any] = (
        (lambda batches: _bare(model, batches, options["dtype"])) if bare else learner.update
    )
    tokens = 0
    for samples in steps:
        meter.begin()
        batches = learner.pack(samples)
        step(batches)
        meter.end()
        tokens = max(tokens, *(len(batch.token_ids) for batch in batches))
    return tokens


def _bare(model: Any, batches: Sequence[MicroBatch], dtype: str) -> None:
    """Forward and backward of the body alone: no head, no loss, no optimizer."""
    model.zero_grad()
    for batch in batches:
        batch = batch.to(model.device)
        with computing(dtype, model.device):
            states = hidden_states(model, batch.token_ids, batch.position_ids, batch.pieces)
        states.backward(torch.ones_like(states))


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
