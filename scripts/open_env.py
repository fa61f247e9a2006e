"""Opening what tasks need: environment and sandboxes. It loads no model library, so making data starts quickly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from envs.base import Env
from envs.lookup_calc import LookupCalc
from envs.sandbox.base import SandboxFactory
from envs.sandbox.open import open_factory
from envs.task_folder import TaskFolders
from rollouts.config import EnvConfig, SandboxConfig


def open_env(config: EnvConfig, *, sandboxes: SandboxFactory | None = None, mistake_rate: float = 0.0) -> Env:
    """The environment; one that is to grade attempts gets the `sandboxes` too, for what it runs outside of theirs.

    Raises:
        ValueError: its tasks cannot be used.
    """
    if config.name == "task_folder":
        return TaskFolders(None if config.folder is None else Path(config.folder), sandboxes=sandboxes)
    return LookupCalc(max_calls=config.max_calls, call_weights=config.call_weights, mistake_rate=mistake_rate)


@asynccontextmanager
async def open_sandboxes(config: SandboxConfig) -> AsyncIterator[SandboxFactory]:
    """Sandboxes of the configured kind; all of them are gone at the end.

    Raises:
        SandboxUnavailableError: there is none of this kind here.
    """
    factory = await open_factory(config.backend, config.image, warm=config.warm, runtime=config.runtime)
    try:
        yield factory
    finally:
        await factory.close()
