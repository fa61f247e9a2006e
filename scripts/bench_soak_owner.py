"""One owner process of the soak test: it runs trajectories, and says on stdout how each begins and ends.

`scripts/bench_soak.py` starts it and kills it. The first line of stdin is its `Job` as JSON; when stdin ends, so does
the owner, so that nothing goes on when the soak test itself is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from envs.sandbox.base import SandboxError, SandboxFactory, SandboxSpec, SandboxUnavailableError
from envs.sandbox.open import Backend, open_factory
from scripts.bench_soak_faults import KINDS, PlannedError, Work, WrongError, kind_of
from scripts.console import run_main

TOKEN_VARIABLE = "AGENTGRAD_SOAK"
"""In the environment of all that the soak test starts: owners, pools, and the commands in the sandboxes."""
WARM = 4
"""Sandboxes that each pool keeps ready: they must not be left either."""
OPEN_S = 120.0
PROBE_S = 1.0
"""Between two looks whether a back-end works again; no trajectory begins meanwhile, as none would in a real run."""
HUNG_S = 240.0
CANCEL_WITHIN_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an owner does; `concurrency` is its own."""

    trajectories: tuple[int, ...]
    backends: tuple[Backend, ...]
    image: str
    concurrency: int
    seed: int
    faults: bool
    token: str

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class _Place:
    """A factory, and whether it gives sandboxes just now."""

    def __init__(self, factory: SandboxFactory) -> None:
        self.factory = factory
        self.works = asyncio.Event()
        self.works.set()

    async def recover(self) -> None:
        """After a SandboxError: let nothing begin until a sandbox can be had again, or much time has gone by."""
        if not self.works.is_set():
            return
        self.works.clear()
        deadline = time.monotonic() + OPEN_S
        while time.monotonic() < deadline:
            try:
                await (await self.factory.start(SandboxSpec())).close()
                break
            except SandboxError:
                await asyncio.sleep(PROBE_S)
        self.works.set()


async def run_job(job: Job) -> None:
    """Run all trajectories, `concurrency` at a time."""
    async with AsyncExitStack() as stack:
        places: dict[Backend, _Place] = {}
        for backend in job.backends:
            places[backend] = _Place(await _open(backend, job.image))
            stack.push_async_callback(places[backend].factory.close)
        waiting = deque(job.trajectories)

        async def slot() -> None:
            while waiting:
                await _run(job, waiting.popleft(), places)

        async with asyncio.TaskGroup() as group:
            for _ in range(job.concurrency):
                group.create_task(slot())


async def _open(backend: Backend, image: str) -> SandboxFactory:
    """The daemon may be down just now: it is given time."""
    deadline = time.monotonic() + OPEN_S
    while True:
        try:
            return await open_factory(backend, image, warm=WARM)
        except SandboxUnavailableError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(PROBE_S)


async def _run(job: Job, trajectory: int, places: dict[Backend, _Place]) -> None:
    """One trajectory, with its report."""
    chance = random.Random(f"{job.seed}/{trajectory}")
    backend = chance.choice(job.backends)
    kind = kind_of(trajectory, job.seed, job.faults)
    place = places[backend]
    await place.works.wait()
    _say({"begin": trajectory, "kind": kind, "backend": backend})
    spec = SandboxSpec(files={"given": b"given"}, env={TOKEN_VARIABLE: job.token})

    async def whole() -> None:
        async with await place.factory.start(spec) as sandbox:
            mark = f"{job.token}-{trajectory}"
            await KINDS[kind][0](Work(sandbox=sandbox, mark=mark, random=chance))

    outcome, why = "expected", ""
    try:
        async with asyncio.timeout(HUNG_S):
            if kind == "cancelled":
                await _cancel_after(whole(), chance.uniform(0, CANCEL_WITHIN_S))
            else:
                await whole()
        if kind == "fails":
            outcome, why = "wrong", "the planned error did not arrive"
    except PlannedError:
        pass
    except WrongError as error:
        outcome, why = "wrong", str(error)
    except SandboxError as error:
        outcome, why = "sandbox_error", reason(error)
    except TimeoutError:
        outcome, why = "hung", f"{kind} did not end within {HUNG_S:.0f} s"
    except Exception as error:
        outcome, why = "wrong", f"{type(error).__name__}: {error}"
    _say({"end": trajectory, "outcome": outcome, "why": why})
    if outcome == "sandbox_error":
        await place.recover()


async def _cancel_after(body: Any, delay_s: float) -> None:
    """Run `body`, and cancel it; what it raises of its own is raised here."""
    task = asyncio.ensure_future(body)
    try:
        await asyncio.wait([task], timeout=delay_s)
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def reason(error: SandboxError) -> str:
    """The message without what is different each time.

    >>> reason(SandboxError("docker: container 3f9a2b7c01 ended with 137"))
    'docker: container # ended with #'
    """
    text = re.sub(r"soak-\w+", "soak-#", " ".join(str(error).split()))
    return re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|\d+", "#", text)[:200]


def _say(event: dict[str, Any]) -> None:
    # One write, so that a kill in between leaves no half line.
    os.write(1, (json.dumps(event) + "\n").encode())


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    lists: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("trajectories", "backends")}
    job = Job(**given, **lists)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    asyncio.run(run_job(job))


if __name__ == "__main__":
    run_main(main)
