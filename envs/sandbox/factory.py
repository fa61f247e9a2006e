"""What every factory does in the same way: it knows which of its sandboxes are open, and closes them with itself."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from envs.sandbox.base import SandboxError, SandboxSpec
from envs.sandbox.served import ServedSandbox, Started


class ServedFactory:
    """The `SandboxFactory` protocol on top of `_begin` and `_release`."""

    name: str
    confined = False

    def __init__(self) -> None:
        self._sandboxes: set[ServedSandbox] = set()
        self._closed = False

    async def _begin(self, spec: SandboxSpec) -> Started:
        """A new, empty sandbox; when it fails or is cancelled, nothing of it is left."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Release what the factory holds. Called once, when its sandboxes are closed."""

    async def start(self, spec: SandboxSpec) -> ServedSandbox:
        """See `SandboxFactory.start`."""
        self._check_open()
        self._sandboxes = {sandbox for sandbox in self._sandboxes if not sandbox.closed}
        sandbox = await ServedSandbox.open(self.name, spec, self._begin, confined=self.confined)
        if self._closed:
            await sandbox.close()
            raise SandboxError(f"{self.name}: the factory was closed while a sandbox started")
        self._sandboxes.add(sandbox)
        return sandbox

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(f"{self.name}: the factory is closed; open a new one")

    async def close(self) -> None:
        """Close every sandbox that is still open, and release what the factory holds. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            ended = await asyncio.gather(*(sandbox.close() for sandbox in self._sandboxes), return_exceptions=True)
        finally:
            await self._release()
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
