"""How fast are our sandboxes? Against `docker exec`, `containers.run` and SWE-ReX, in one run and in the same image.

The container of the peers has a bridge network where there is one, since SWE-ReX is spoken to over HTTP; ours has none.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from envs.sandbox.base import DEFAULT_IMAGE, Sandbox, SandboxError, SandboxFactory, SandboxSpec, Shell
from envs.sandbox.open import open_factory
from envs.sandbox.pool import MAX_WARM
from envs.sandbox.pool_client import PoolFactory
from envs.types import ExecResult
from scripts.bench_peers import BENCH_IMAGE, DockerPeer, check_swe_rex, execute_of, session_of, swe_rex
from scripts.bench_timing import Run, Start, Started, command_latency, many_at_once, show, start_latency

COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {"true": (("true",), ""), "echo": (("sh", "-c", "echo x"), "x")}
"""Name in the result → (argv, what it prints)."""

TIMEOUT_S = 60.0
WARM = 8
"""Sandboxes that the pool keeps ready where warm starts are measured."""
FILL_S = 60.0
PAUSE_S = 0.1
COMMANDS_EACH = {"ours": 50, "peer": 3}
"""Commands of each of the sandboxes that run at once; `docker exec` takes some 100 times as long."""

MAX_EXEC_RATIO = 1 / 20
MAX_SWE_REX_RATIO = 1.0
MAX_WARM_START_MS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured; numbers are counts."""

    backends: Sequence[str]
    image: str
    with_swe_rex: bool
    commands: int
    starts: int
    burst: int


def sandbox(
    *,
    backends: Sequence[str] = ("docker", "bubblewrap"),
    image: str | None = None,
    with_swe_rex: bool = True,
    commands: int = 200,
    starts: int = 30,
    burst: int = 64,
) -> dict[str, Any]:
    """Measure everything once; the result is what the last line of output shows.

    `passed` is false when any answer was wrong. Speed never fails a run: `targets` says what was met.

    Raises:
        ValueError: SWE-ReX is asked for and not installed.
        SandboxUnavailableError: a back-end that was asked for cannot be had here.
    """
    with_swe_rex = with_swe_rex and "docker" in backends
    if with_swe_rex:
        check_swe_rex()
    options = Options(
        backends=backends,
        image=image or BENCH_IMAGE,
        with_swe_rex=with_swe_rex,
        commands=commands,
        starts=starts,
        burst=burst,
    )
    with _pools_of_its_own():
        return asyncio.run(_measure(options))


@contextmanager
def _pools_of_its_own() -> Iterator[None]:
    """A pool is shared by what runs on a host; with a cache folder of its own this run shares none."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


async def _measure(options: Options) -> dict[str, Any]:
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        peer = None
        if "docker" in options.backends:
            peer = DockerPeer(options.image)
            stack.push_async_callback(peer.close)
            await peer.connect()
        network = await peer.network() if peer else "none"
        commands = await _commands(options, peer, network)
        warm, close_warm = await _warm_starts(options)
        cold, close_cold = await _cold_starts(options, peer)
        bursts = await _bursts(options, peer)
        machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}
        machine |= await peer.facts() if peer else {}
    targets = _targets(commands, warm)
    return {
        "benchmark": "sandbox",
        "passed": _all_right(commands, bursts, options),
        "targets_met": {target["name"]: target["met"] for target in targets},
        "targets": targets,
        "commands": commands,
        "start": {"warm": warm, "cold": cold},
        "close": {"warm": close_warm, "cold": close_cold},
        "burst": bursts,
        "image": options.image if peer else None,
        "peer_network": {"commands": network, "starts": "none"} if peer else None,
        "machine": machine,
        "swe_rex": version("swe-rex") if options.with_swe_rex else None,
        "wall_s": round(time.perf_counter() - began, 1),
    }


async def _commands(options: Options, peer: DockerPeer | None, network: str) -> dict[str, dict[str, Any]]:
    """Command latency of each contender; what was not measured is None."""
    rows: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        contenders: dict[str, Run] = {}
        for backend in options.backends:
            # Without a pool: nothing is made in the background while commands are timed.
            factory = await stack.enter_async_context(_factory(backend, options.image, warm=0))
            ours = await stack.enter_async_context(await factory.start(SandboxSpec()))
            contenders[f"ours_{backend}"] = _exec_of(ours)
            contenders[f"ours_{backend}_shell"] = _shell_of(ours.shell())
        if peer and options.with_swe_rex:
            container, runtime = await stack.enter_async_context(swe_rex(peer, network))
            contenders["docker_exec"] = peer.exec_in(container)
            contenders["swe_rex_execute"] = execute_of(runtime)
            contenders["swe_rex_session"] = await session_of(runtime)
        elif peer:
            container = await peer.run_container()
            stack.push_async_callback(peer.remove, container)
            contenders["docker_exec"] = peer.exec_in(container)
        for name, (argv, expected) in COMMANDS.items():
            rows[name] = await command_latency(contenders, argv, expected, options.commands)
            show(f"command {name}", rows[name])
    for row in rows.values():
        for name in ("docker_exec", "swe_rex_execute", "swe_rex_session"):
            row.setdefault(name, None)
    return rows


async def _warm_starts(options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each start finds a full pool: they come more slowly than the pool makes sandboxes anew."""
    async with AsyncExitStack() as stack:
        contenders: dict[str, Start] = {}
        factories: list[SandboxFactory] = []
        for backend in options.backends:
            factory = await stack.enter_async_context(_factory(backend, options.image, warm=WARM))
            contenders[f"ours_{backend}"] = _start_of(factory)
            factories.append(factory)
        starts, stops = await start_latency(contenders, options.starts, partial(_until_full, factories, WARM))
    show("start, warm", starts)
    show("close, warm", stops)
    return starts, stops


async def _until_full(factories: Sequence[SandboxFactory], warm: int) -> None:
    await asyncio.sleep(PAUSE_S)
    for factory in factories:
        assert isinstance(factory, PoolFactory)
        for _ in range(int(FILL_S / PAUSE_S)):
            if (await factory.pool_state())["ready"] >= warm:
                break
            await asyncio.sleep(PAUSE_S)
        else:
            raise SandboxError(f"{factory.name}: the pool holds no {warm} sandboxes after {FILL_S:.0f} s")


async def _cold_starts(options: Options, peer: DockerPeer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    async with AsyncExitStack() as stack:
        contenders: dict[str, Start] = {}
        for backend in options.backends:
            factory = await stack.enter_async_context(_factory(backend, options.image, warm=0))
            contenders[f"ours_{backend}"] = _start_of(factory)
        if peer:
            contenders["containers_run"] = peer.start
        starts, stops = await start_latency(contenders, options.starts, partial(asyncio.sleep, PAUSE_S))
    show("start, cold", starts)
    show("close, cold", stops)
    return starts | ({} if peer else {"containers_run": None}), stops | ({} if peer else {"containers_run": None})


async def _bursts(options: Options, peer: DockerPeer | None) -> dict[str, Any]:
    """Many at once: ours with nothing made ahead, ours from a full pool, and the peer."""
    rows: dict[str, Any] = {}
    for backend in options.backends:
        for name, warm in ((f"ours_{backend}", 0), (f"ours_{backend}_warm", options.burst)):
            async with _factory(backend, options.image, warm=warm) as factory:
                if warm:
                    await _until_full([factory], min(warm, MAX_WARM))
                row = await many_at_once(_start_of(factory), options.burst, 1 if warm else COMMANDS_EACH["ours"])
                # A pool fills up again while the commands run, which is what their time would show.
                rows[name] = {key: value for key, value in row.items() if not warm or "command" not in key}
            show("at once", {name: rows[name]})
    if peer:
        rows["docker_exec"] = await many_at_once(peer.start, options.burst, COMMANDS_EACH["peer"])
        show("at once", {"docker_exec": rows["docker_exec"]})
    return rows


@asynccontextmanager
async def _factory(backend: str, image: str, warm: int) -> AsyncIterator[SandboxFactory]:
    """`warm`: how many sandboxes are kept ready. bubblewrap has the machine's own programs, whatever the image."""
    docker = backend == "docker"
    factory = await open_factory("docker" if docker else "bubblewrap", image if docker else DEFAULT_IMAGE, warm=warm)
    try:
        yield factory
    finally:
        await factory.close()


def _start_of(factory: SandboxFactory) -> Start:
    async def start() -> Started:
        ours = await factory.start(SandboxSpec())
        return Started(run=_exec_of(ours), stop=ours.close)

    return start


def _exec_of(ours: Sandbox) -> Run:
    async def run(argv: Sequence[str]) -> str:
        return _stdout(await ours.exec(argv, timeout_s=TIMEOUT_S), argv)

    return run


def _shell_of(shell: Shell) -> Run:
    async def run(argv: Sequence[str]) -> str:
        return _stdout(await shell.run(shlex.join(argv), timeout_s=TIMEOUT_S), argv)

    return run


def _stdout(done: ExecResult, argv: Sequence[str]) -> str:
    if done.exit_code != 0:
        raise SandboxError(f"{shlex.join(argv)} ended with {done.exit_code}: {done.stderr}")
    return done.stdout


def _targets(commands: dict[str, dict[str, Any]], warm: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with its value; None where a side of it was not measured."""
    targets: list[dict[str, Any]] = []
    for name, row in commands.items():
        for peer, limit in (("docker_exec", MAX_EXEC_RATIO), ("swe_rex_execute", MAX_SWE_REX_RATIO)):
            ours, other = row.get("ours_docker"), row[peer]
            ratio = ours["p50_ms"] / other["p50_ms"] if ours and other else None
            targets.append(_target(f"{name}_p50_ours_docker_to_{peer}", ratio, limit))
    targets += [_target(f"warm_start_p50_ms_{name}", row["p50_ms"], MAX_WARM_START_MS) for name, row in warm.items()]
    return targets


def _target(name: str, value: float | None, limit: float) -> dict[str, Any]:
    met = None if value is None else value <= limit
    rounded = None if value is None else round(value, 4)
    print(f"{'target':<14} {name:<42} {rounded} (at most {limit:g}): {'not measured' if met is None else met}")
    return {"name": name, "value": rounded, "at_most": limit, "met": met}


def _all_right(commands: dict[str, dict[str, Any]], bursts: dict[str, Any], options: Options) -> bool:
    answers = [row["wrong"] == 0 for rows in commands.values() for row in rows.values() if row]
    return all(answers) and all(row["right"] == options.burst for row in bursts.values())
