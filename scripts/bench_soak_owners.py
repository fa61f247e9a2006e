"""The owner processes of the soak test: started, listened to, killed and started again until all work is done."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sandbox.base import SandboxError
from scripts.bench_soak_leftovers import peak_memory_bytes, pools_of
from scripts.bench_soak_owner import TOKEN_VARIABLE, Job
from scripts.console import progress

END_S = 60.0
"""After SIGTERM; an owner that is still there is deaf to it."""
LAST_LINES_S = 2.0
POLL_S = 0.5
MAX_CRASHES = 5


@dataclass(slots=True, kw_only=True)
class Record:
    """One trajectory. `outcome`: expected, sandbox_error, wrong, hung, lost_with_owner; empty while it runs."""

    kind: str
    backend: str
    outcome: str = ""
    why: str = ""


class Owners:
    """All owner processes and what they have reported."""

    def __init__(self, jobs: Sequence[Job], environment: dict[str, str], folder: Path) -> None:
        self.records: dict[int, Record] = {}
        self.faults: Counter[str] = Counter()
        self.peak_bytes: dict[str, int] = {"owner": 0, "pool": 0}
        self.crashed = 0
        self.deaf = 0
        self.count = 0
        """How many trajectories have ended."""
        self._jobs = jobs
        self._environment = environment
        self._token = environment[TOKEN_VARIABLE]
        self._folder = folder
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._told: set[int] = set()
        """Process ids that were sent a signal: it is no surprise when they end."""
        self._watchers: list[asyncio.Task[None]] = []
        self._finished = False
        self._progressed = asyncio.Event()

    async def run(self) -> None:
        """Returns when every trajectory has ended in some way."""
        watching = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for number, job in enumerate(self._jobs):
                    group.create_task(self._keep(number, job))
        finally:
            self._finished = True
            self._progressed.set()
            watching.cancel()
            await asyncio.gather(watching, *self._watchers, return_exceptions=True)

    async def reach(self, count: int) -> bool:
        """Wait until so many trajectories have ended; False when all work is done before."""
        while self.count < count and not self._finished:
            self._progressed.clear()
            await self._progressed.wait()
        return not self._finished

    def signal_one(self, chance: random.Random, kill: signal.Signals) -> bool:
        """Send a signal to an owner that is in the middle of something; False when there is none."""
        busy = [number for number, process in self._processes.items() if process.pid not in self._told]
        if not busy:
            return False
        process = self._processes[chance.choice(sorted(busy))]
        self._told.add(process.pid)
        process.send_signal(kill)
        if kill == signal.SIGTERM:
            self._watchers.append(asyncio.ensure_future(self._must_end(process)))
        return True

    async def kill_pool(self, chance: random.Random) -> bool:
        """SIGKILL a warm pool; False when there is none just now."""
        pools = await asyncio.to_thread(pools_of, self._token)
        with suppress(ProcessLookupError):
            if pools:
                os.kill(chance.choice(sorted(pools)), signal.SIGKILL)
                return True
        return False

    async def _must_end(self, process: asyncio.subprocess.Process) -> None:
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            self.deaf += 1
            process.kill()

    async def _keep(self, number: int, job: Job) -> None:
        """Start the owner, and again as long as trajectories of it have not ended."""
        crashes = 0
        while rest := tuple(one for one in job.trajectories if one not in self.records):
            crashed = await self._one(number, replace(job, trajectories=rest))
            crashes += crashed
            if crashes >= MAX_CRASHES:
                raise SandboxError(
                    f"owner {number} of the soak test crashed {crashes} times: {self._last_words(number)}"
                )

    async def _one(self, number: int, job: Job) -> bool:
        """One life of an owner; whether it ended by itself before its work was done."""
        with self._log(number).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "scripts.bench_soak_owner"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self._processes[number] = process
        assert process.stdin is not None
        assert process.stdout is not None
        listening = asyncio.ensure_future(self._listen(process.stdout))
        try:
            with suppress(ConnectionError):
                process.stdin.write(job.as_json().encode() + b"\n")
                await process.stdin.drain()
            await process.wait()
            # A process that it started may hold the pipe open: its end is not waited for for ever.
            await asyncio.wait([listening], timeout=LAST_LINES_S)
        finally:
            listening.cancel()
            del self._processes[number]
            if process.returncode is None:
                await self._stop(process)
        self._lose(job)
        crashed = process.returncode != 0 and process.pid not in self._told
        self._told.discard(process.pid)
        self.crashed += crashed
        if crashed:
            print(f"owner {number} ended with {process.returncode}: {self._last_words(number)}", file=sys.stderr)
        return crashed

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        """The soak test itself is being ended: so are its owners, with time to remove their sandboxes."""
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            event = json.loads(line)
            if "begin" in event:
                self.records[event["begin"]] = Record(kind=event["kind"], backend=event["backend"])
            else:
                record = self.records[event["end"]]
                record.outcome, record.why = event["outcome"], event["why"]
                self._count_one()

    def _count_one(self) -> None:
        self.count += 1
        self._progressed.set()

    def _lose(self, job: Job) -> None:
        for one in job.trajectories:
            record = self.records.get(one)
            if record is not None and not record.outcome:
                record.outcome = "lost_with_owner"
                self._count_one()

    async def _watch(self) -> None:
        """Draw the progress, and note how much memory the processes have."""
        total = sum(len(job.trajectories) for job in self._jobs)
        with progress() as bar:
            place = bar.add_task("trajectories", total=total, note="")
            printed = 0
            while True:
                for process in self._processes.values():
                    self._note("owner", process.pid)
                for pool in await asyncio.to_thread(pools_of, self._token):
                    self._note("pool", pool)
                bar.update(place, completed=self.count, note=f"{sum(self.faults.values())} faults")
                if self.count * 10 // total > printed:
                    printed = self.count * 10 // total
                    print(f"{self.count} of {total} trajectories, {sum(self.faults.values())} faults", flush=True)
                await asyncio.sleep(POLL_S)

    def _note(self, name: str, number: int) -> None:
        self.peak_bytes[name] = max(self.peak_bytes[name], peak_memory_bytes(number))

    def _log(self, number: int) -> Path:
        return self._folder / f"owner-{number}.log"

    def _last_words(self, number: int) -> str:
        return " ".join(self._log(number).read_text(errors="replace").splitlines()[-1:])
