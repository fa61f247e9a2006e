"""Does anything leak, and is any result ever wrong? A thousand simulated trajectories while everything is being killed.

Several owner processes run the trajectories. Meanwhile owners, warm pools and the Docker daemon are killed. Each
trajectory ends in exactly one way that is counted, and at the end nothing may be left of any.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envs.sandbox.base import DEFAULT_IMAGE
from envs.sandbox.open import Backend, open_factory
from envs.sandbox.wire import SILENCE_S
from scripts.bench_soak_daemon import OwnDaemon, can_have_own_daemon, work_folder
from scripts.bench_soak_leftovers import Names, Place, engine_orphans, left, names_of
from scripts.bench_soak_owner import TOKEN_VARIABLE, Job
from scripts.bench_soak_owners import Owners
from scripts.bench_soak_table import table

Action = Literal["owner_sigkill", "owner_sigterm", "pool_sigkill", "daemon_sigkill", "daemon_sigterm"]

EVERY: dict[Action, int] = {
    "owner_sigkill": 60,
    "owner_sigterm": 120,
    "pool_sigkill": 120,
    "daemon_sigkill": 400,
    "daemon_sigterm": 400,
}
"""A fault of this kind for so many trajectories, and at least one."""
GRACE_S = 20.0
"""For what ends by itself; the rest has to be removed by the next process that uses sandboxes."""
REAPED_S = SILENCE_S + 30.0
"""What a killed engine had half started holds its channel open; it ends when nobody has spoken for so long."""
MAX_MEMORY_BYTES = 384 * 1024 * 1024
"""Of an owner and of a pool: a flood of 300 MB must not be held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    trajectories: int
    faults: bool
    backends: tuple[Backend, ...]
    image: str
    concurrency: int
    owners: int
    seed: int
    daemon_restarts: bool


def soak(
    *,
    trajectories: int = 1000,
    faults: bool = False,
    backend: str = "both",
    image: str | None = None,
    concurrency: int = 32,
    owners: int = 4,
    seed: int = 0,
    daemon_restarts: bool = True,
) -> dict[str, Any]:
    """Run it; `passed` is false for any leftover, wrong or hanging result, crashed owner, or unbounded memory.

    Raises:
        SandboxUnavailableError: a back-end that was asked for cannot be had here.
    """
    backends: dict[str, tuple[Backend, ...]] = {"both": ("docker", "bubblewrap")}
    only: Backend = "docker" if backend == "docker" else "bubblewrap"
    options = Options(
        trajectories=trajectories,
        faults=faults,
        backends=backends.get(backend, (only,)),
        image=image or DEFAULT_IMAGE,
        concurrency=concurrency,
        owners=min(owners, trajectories),
        seed=seed,
        daemon_restarts=daemon_restarts,
    )
    return asyncio.run(_soak(options))


async def _soak(options: Options) -> dict[str, Any]:
    began = time.perf_counter()
    token = secrets.token_hex(8)
    async with AsyncExitStack() as stack:
        folder = await asyncio.to_thread(stack.enter_context, work_folder())
        daemon = await _daemon(options, folder, stack)
        if daemon is None:  # what is missing is said before owners are started, and started again
            await open_and_close([options.image, *options.backends])
        place, environment = _place(options, folder, token, daemon)
        before = await asyncio.to_thread(names_of, place)
        owners = Owners(_jobs(options, token), environment, folder)
        async with asyncio.TaskGroup() as group:
            group.create_task(owners.run())
            if options.faults:
                group.create_task(_make_faults(options, owners, daemon))
        seconds = time.perf_counter() - began
        remains, before_reaper = await _what_is_left(options, place, before, environment)
        print(table(owners.records, owners.faults, remains, owners.peak_bytes), flush=True)
        return _result(options, owners, daemon, remains, before_reaper, seconds)


async def _daemon(options: Options, folder: Path, stack: AsyncExitStack) -> OwnDaemon | None:
    """A daemon of our own, where it is to be killed; None for the machine's."""
    wanted = "docker" in options.backends and options.faults and options.daemon_restarts
    if not wanted or not can_have_own_daemon():
        return None
    daemon = OwnDaemon(folder / "dockerd")
    stack.push_async_callback(daemon.stop)
    await daemon.start()
    await daemon.get_image(options.image)
    return daemon


def _place(options: Options, folder: Path, token: str, daemon: OwnDaemon | None) -> tuple[Place, dict[str, str]]:
    """Where to look for leftovers, and the environment of the owners: the pools of a host are theirs alone."""
    temporary, cache = folder / "tmp", folder / "cache"
    for path in (temporary, cache):
        path.mkdir(mode=0o700)
    environment = os.environ | {
        TOKEN_VARIABLE: token,
        "TMPDIR": str(temporary),
        "XDG_CACHE_HOME": str(cache),
    }
    host = None
    if "docker" in options.backends:
        host = daemon.host if daemon else os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        environment["DOCKER_HOST"] = host
    place = Place(token=token, temporary=temporary, docker_host=host, own_daemon=daemon.folder if daemon else None)
    return place, environment


def _jobs(options: Options, token: str) -> list[Job]:
    """One for each owner; trajectories are dealt like cards."""
    return [
        Job(
            trajectories=tuple(range(number, options.trajectories, options.owners)),
            backends=options.backends,
            image=options.image,
            concurrency=max(1, options.concurrency // options.owners),
            seed=options.seed,
            faults=options.faults,
            token=token,
        )
        for number in range(options.owners)
    ]


def plan_faults(options: Options, *, own_daemon: bool) -> list[tuple[int, Action]]:
    """(after so many trajectories, what then), in order; the same for the same seed."""
    chance = random.Random(f"{options.seed}/faults")
    plan: list[tuple[int, Action]] = []
    for action, every in EVERY.items():
        if action.startswith("daemon") and not own_daemon:
            continue
        for _ in range(max(1, options.trajectories // every)):
            plan.append((int(options.trajectories * chance.uniform(0.05, 0.9)), action))
    return sorted(plan)


async def _make_faults(options: Options, owners: Owners, daemon: OwnDaemon | None) -> None:
    chance = random.Random(f"{options.seed}/targets")
    for threshold, action in plan_faults(options, own_daemon=daemon is not None):
        if not await owners.reach(threshold):
            return
        if action == "pool_sigkill":
            done = await owners.kill_pool(chance)
        elif action == "owner_sigkill":
            done = owners.signal_one(chance, signal.SIGKILL)
        elif action == "owner_sigterm":
            done = owners.signal_one(chance, signal.SIGTERM)
        else:
            assert daemon is not None
            kill = signal.SIGKILL if action == "daemon_sigkill" else signal.SIGTERM
            await daemon.restart(kill, chance.uniform(0.2, 2.0))
            done = True
        owners.faults[action if done else f"{action}_found_nothing"] += 1


async def _what_is_left(
    options: Options, place: Place, before: Names, environment: dict[str, str]
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """What is left at the end, and how much of each kind it was before a next process came and removed it.

    A pool that was killed cannot remove what it kept: empty control groups, or containers that it had not yet started.
    """
    found = await _left_within(GRACE_S, place, before)
    if not any(found.values()):
        return found, {}
    await _reap(options, environment)
    return await _left_within(REAPED_S, place, before), {kind: len(names) for kind, names in found.items() if names}


async def _left_within(grace_s: float, place: Place, before: Names) -> dict[str, list[str]]:
    deadline = time.monotonic() + grace_s
    while True:
        found = left(before, await asyncio.to_thread(names_of, place))
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(1.0)


async def _reap(options: Options, environment: dict[str, str]) -> None:
    """Open and close each kind of factory in a new process, as whoever comes next does."""
    code = (
        "import asyncio, sys; from scripts.bench_soak import open_and_close; asyncio.run(open_and_close(sys.argv[1:]))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, options.image, *options.backends), env=environment
    )
    await process.wait()


async def open_and_close(arguments: Sequence[str]) -> None:
    image, *backends = arguments
    for backend in backends:
        kind: Backend = "docker" if backend == "docker" else "bubblewrap"
        await (await open_factory(kind, image)).close()


def _counts(found: dict[str, list[str]]) -> dict[str, int]:
    return {kind: len(names) for kind, names in found.items()}


def _result(
    options: Options,
    owners: Owners,
    daemon: OwnDaemon | None,
    remains: dict[str, list[str]],
    before_reaper: dict[str, int],
    seconds: float,
) -> dict[str, Any]:
    outcomes = Counter(record.outcome for record in owners.records.values())
    counts = {name: outcomes[name] for name in ("expected", "sandbox_error", "lost_with_owner", "wrong", "hung")}
    leftovers = sum(_counts(remains).values())
    bounded = all(peak <= MAX_MEMORY_BYTES for peak in owners.peak_bytes.values())
    whole = sum(counts.values()) == options.trajectories
    failed = counts["wrong"] + counts["hung"] + owners.crashed + owners.deaf + leftovers
    records = owners.records.values()
    return {
        "benchmark": "soak",
        "passed": failed == 0 and bounded and whole,
        "trajectories": options.trajectories,
        **counts,
        "all_accounted_for": whole,
        "sandbox_errors": dict(Counter(one.why for one in records if one.outcome == "sandbox_error").most_common()),
        "wrong_results": [f"{one.kind}: {one.why}" for one in records if one.outcome in ("wrong", "hung")][:10],
        "owners_crashed": owners.crashed,
        "owners_deaf_to_sigterm": owners.deaf,
        "faults": dict(owners.faults),
        "leftovers": leftovers,
        "leftovers_by_kind": _counts(remains),
        "leftover_names": {kind: names[:5] for kind, names in remains.items() if names},
        "removed_by_reaper": before_reaper,
        "orphans_of_killed_engine": engine_orphans(daemon.folder) if daemon else 0,
        "peak_memory_mib": {name: round(peak / 2**20, 1) for name, peak in owners.peak_bytes.items()},
        "memory_bounded": bounded,
        "backends": list(options.backends),
        "docker_daemon": None if "docker" not in options.backends else "own" if daemon else "the machine's",
        "owners": options.owners,
        "concurrency": options.concurrency,
        "seed": options.seed,
        "wall_s": round(seconds, 1),
    }
