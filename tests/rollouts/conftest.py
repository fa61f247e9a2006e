"""What the tests of the engine over servers share: stub servers, and engines that are connected to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.engine_server import ServerEngine
from rollouts.server_patience import Patience
from tests.rollouts.stub_server import StubServer, save_stub_model

SOON = Patience(
    health_interval_s=0.05, health_timeout_s=20, request_timeout_s=60, backoff_s=0.02, recovery_s=0.5, attempts=4
)
"""Looks often, and waits long: the machine may be busy, and no test here is about how fast a stub answers."""


@pytest.fixture(scope="module")
def stub_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stub_model(tmp_path_factory.mktemp("models") / "stub")


@pytest.fixture
def stub() -> Iterator[Callable[..., StubServer]]:
    """Makes stubs, and ends them."""
    made: list[StubServer] = []

    def make(**changed: Any) -> StubServer:
        made.append(StubServer(**changed))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def connect(stub_model: Path) -> Iterator[Callable[..., ServerEngine]]:
    """Makes engines, and closes them."""
    made: list[ServerEngine] = []

    def make(*servers: StubServer, **changed: Any) -> ServerEngine:
        settings: dict[str, Any] = {"model": stub_model, "max_context_tokens": 256, "patience": SOON} | changed
        made.append(ServerEngine([server.address for server in servers], **settings))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.close())
