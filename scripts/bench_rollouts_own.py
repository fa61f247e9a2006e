"""What does a turn cost us? CPU time of the process, with a scripted engine and a tool that does nothing.

Counted is all that this process does: scheduling, rendering, reading calls, calling the tool, the ledger on disk and
the record on disk. A first pass is not counted (templates are compiled in it).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from data.chat import Renderer
from data.ledger import Ledger
from envs.types import Task
from rollouts.config import LimitsConfig, PricesConfig, SamplingConfig, ScheduleConfig
from rollouts.engine import Engine, RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.record import Record
from rollouts.replay import NoSandboxes
from rollouts.runner import Runner
from rollouts.scheduler import sample_groups
from rollouts.types import StopReason, Trajectory
from scripts.bench_rollouts_plan import Facts, Plan, PlannedEnv, calls_of

RUNS = 3


def own_cost(plan: Plan, renderer: Renderer, *, limit: int) -> dict[str, Any]:
    """CPU time per turn in ms: median and each run; and where it goes, from one further run.

    The parts are calls that never wait; what they leave is the rest. Looking at the clock is in it too.
    """
    env = PlannedEnv(plan, Facts(plan, wait=False))
    script = dict(calls_of(plan, renderer, env).values())
    milliseconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number in range(RUNS + 1):
            milliseconds.append(_cpu_ms_per_turn(plan, renderer, env, script, Path(folder, str(number)), limit, None))
        parts: dict[str, float] = defaultdict(float)
        whole = _cpu_ms_per_turn(plan, renderer, env, script, Path(folder, "parts"), limit, parts)
    breakdown = {name: round(1000 * seconds / plan.num_turns, 3) for name, seconds in sorted(parts.items())}
    breakdown["rest"] = round(whole - sum(breakdown.values()), 3)
    return {
        "cpu_ms_per_turn": round(statistics.median(milliseconds[1:]), 3),
        "runs": [round(value, 3) for value in milliseconds[1:]],
        "turns": plan.num_turns,
        "breakdown_ms_per_turn": breakdown,
    }


def _cpu_ms_per_turn(
    plan: Plan,
    renderer: Renderer,
    env: PlannedEnv,
    script: dict[tuple[int, ...], tuple[int, ...]],
    folder: Path,
    limit: int,
    parts: dict[str, float] | None,
) -> float:
    ledger = Ledger(folder / "completions.jsonl")
    engine: Engine = ScriptedEngine(script, max_context_tokens=1 << 20, capacity=limit)
    if parts is None:
        recording = RecordingEngine(engine, ledger)
    else:
        recording = RecordingEngine(engine, cast("Ledger", _Timed(ledger, parts, prefix="ledger.")))
        renderer = cast("Renderer", _Timed(renderer, parts, prefix="renderer."))
    began = time.process_time()
    asyncio.run(sample(plan.tasks, recording, renderer, env, folder / "trajectories.jsonl", limit, parts))
    seconds = time.process_time() - began
    ledger.close()
    return 1000 * seconds / plan.num_turns


async def sample(
    tasks: Sequence[Task],
    engine: Engine,
    renderer: Renderer,
    env: PlannedEnv,
    path: Path,
    limit: int,
    parts: dict[str, float] | None = None,
) -> list[Trajectory]:
    """Our rollouts of tasks of a plan, recorded.

    Raises:
        RuntimeError: a trajectory did not end with its final answer.
    """
    runner = Runner(
        engine=engine,
        renderer=renderer,
        env=env,
        sandboxes=NoSandboxes(),
        limits=LimitsConfig(max_turns=64, max_turn_tokens=256, max_trajectory_tokens=1 << 20),
        sampling=SamplingConfig(),
        prices=PricesConfig(),
        tool_timeout_s=60.0,
        seed=0,
    )
    done: list[Trajectory] = []
    with Record(path, settings={}) as file:

        def record(trajectory: Trajectory) -> None:
            began = time.process_time()
            file.append(trajectory)
            if parts is not None:
                parts["record"] += time.process_time() - began
            done.append(trajectory)

        await sample_groups(
            runner,
            tasks,
            num_generations=1,
            prefix="ours",
            schedule=ScheduleConfig(max_trajectories=limit),
            on_done=record,
        )
    for trajectory in done:
        if trajectory.stop_reason is not StopReason.FINAL_ANSWER:
            raise RuntimeError(f"{trajectory.trajectory_id} ended with {trajectory.stop_reason}: {trajectory.cause}")
    return done


class _Timed:
    """Adds the CPU time inside of each method of `target` to `parts`."""

    def __init__(self, target: object, parts: dict[str, float], *, prefix: str) -> None:
        self._target = target
        self._parts = parts
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value
        return self._timed(name, value)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return method(*arguments, **options)
            finally:
                self._parts[self._prefix + name] += time.process_time() - began

        return call
