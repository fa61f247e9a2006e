"""A launcher without sandboxes, for tests of the pool alone: what it launches is one end of a pair of sockets."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping

from envs.sandbox.base import SandboxError, SandboxSpec
from envs.sandbox.launch import Launched


class ScriptedLaunched:
    """Lives until its other end is closed or it is ended."""

    def __init__(self, name: str, variables: Mapping[str, str]) -> None:
        self.name = name
        self.connected, self.inside = socket.socketpair()
        self.variables = variables
        self.ended = False

    def die(self) -> None:
        self.inside.close()

    async def end(self) -> None:
        self.ended = True
        self.connected.close()
        self.inside.close()

    async def why_gone(self) -> str:
        return "it was told to"


class ScriptedLauncher:
    """Launches in `launch_s` seconds; fails while `failing` or `fault` is set. It counts."""

    name = "scripted"

    def __init__(self, launch_s: float = 0.0) -> None:
        self.launch_s = launch_s
        self.failing = False
        self.fault: Exception | None = None
        """What goes wrong in any call, and is no error that a launcher should raise."""
        self.may_start = asyncio.Event()
        """No launch ends while it is cleared."""
        self.may_start.set()
        self.unprepared: list[SandboxSpec] = []
        """Specs that are prepared when `may_prepare` is set."""
        self.may_prepare = asyncio.Event()
        self.variables: Mapping[str, str] = {}
        self.asked: list[SandboxSpec] = []
        self.launched: list[ScriptedLaunched] = []
        self.at_once = 0
        self.most_at_once = 0
        self._numbers = itertools.count()

    async def check(self, spec: SandboxSpec) -> None:
        self._break()

    async def prepare(self, spec: SandboxSpec) -> None:
        if spec in self.unprepared:
            await self.may_prepare.wait()
        self._break()

    async def launch(self, spec: SandboxSpec) -> Launched:
        self.asked.append(spec)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.may_start.wait()
            await asyncio.sleep(self.launch_s)
        finally:
            self.at_once -= 1
        self._break()
        if self.failing:
            raise SandboxError("scripted: it fails now")
        self.launched.append(ScriptedLaunched(f"scripted-{next(self._numbers)}", self.variables))
        return self.launched[-1]

    def _break(self) -> None:
        if self.fault is not None:
            raise self.fault

    @property
    def tries(self) -> int:
        return len(self.asked)

    @property
    def alive(self) -> int:
        return sum(not one.ended for one in self.launched)

    async def end_foreign(self, name: str) -> None:
        self._break()

    async def reap(self) -> int:
        self._break()
        return 0

    async def close(self) -> None: ...
