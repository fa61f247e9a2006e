"""Opening what tasks need: environment and sandboxes. It loads no model library, so making data starts quickly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envs.lookup_calc import LookupCalc
from envs.sandbox.base import SandboxFactory
from envs.sandbox.open import open_factory
from rollouts.config import EnvConfig, SandboxConfig


def open_env(config: EnvConfig, *, mistake_rate: float = 0.0) -> LookupCalc:
    return LookupCalc(max_calls=config.max_calls, call_weights=config.call_weights, mistake_rate=mistake_rate)


@asynccontextmanager
async def open_sandboxes(config: SandboxConfig) -> AsyncIterator[SandboxFactory]:
    """Sandboxes of the configured kind; all of them are gone at the end.

    Raises:
        SandboxUnavailableError: there is none of this kind here.
    """
    factory = await open_factory(config.backend, image=config.image)
    try:
        yield factory
    finally:
        await factory.close()
