"""What every factory does in the same way: it knows which of its sandboxes are open, and closes them with itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from envs.sandbox.base import SandboxError, SandboxSpec
from envs.sandbox.command import CommandSandbox


class CommandFactory(ABC):
    """The `SandboxFactory` protocol on top of `_start` and `_release`; it knows which sandboxes are still open."""

    name: str

    def __init__(self) -> None:
        self._sandboxes: set[CommandSandbox] = set()
        self._closed = False

    @abstractmethod
    async def _start(self, spec: SandboxSpec) -> CommandSandbox:
        """A new sandbox; when it fails or is cancelled, nothing of it is left that `_release` would miss."""

    @abstractmethod
    async def _release(self) -> None:
        """Release what the factory holds. Called once, when its sandboxes are closed."""

    async def start(self, spec: SandboxSpec) -> CommandSandbox:
        """See `SandboxFactory.start`."""
        if self._closed:
            raise SandboxError(f"{self.name}: the factory is closed; open a new one")
        self._sandboxes = {sandbox for sandbox in self._sandboxes if not sandbox.closed}
        sandbox = await self._start(spec)
        if self._closed:
            await sandbox.close()
            raise SandboxError(f"{self.name}: the factory was closed while a sandbox started")
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """Close every sandbox that is still open, and release what the factory holds. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            for sandbox in self._sandboxes:
                await sandbox.close()
        finally:
            await self._release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
