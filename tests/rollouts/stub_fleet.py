"""What the tests of the engine over servers share: requests to it, and stub servers that hold them.

The servers are stubs with a made-up model (`stub_server`), over real HTTP; `conftest` makes and closes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from data.types import Completion, SamplingParams
from rollouts.engine import RecordingEngine
from rollouts.engine_server import ServerEngine
from tests.rollouts.stub_server import StubServer


def sampling(max_tokens: int = 6, seed: int | None = 1, **changed: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": seed, "stop_token_ids": (), **changed})


def run_one(engine: ServerEngine, completion_id: str = "g/0/0", **changed: Any) -> Completion:
    return asyncio.run(engine.generate(completion_id, [5, 6], sampling(**changed)))


async def sample_all(engine: ServerEngine | RecordingEngine, ids: Sequence[str], **changed: Any) -> list[Completion]:
    return await asyncio.gather(
        *(engine.generate(one, [5, 6], sampling(**{"seed": number} | changed)) for number, one in enumerate(ids))
    )


def trajectories(count: int, turn: int = 0) -> list[str]:
    """The ids of turn `turn` of `count` trajectories, four to a group."""
    return [f"step-0/task-{number // 4}/{number % 4}/{turn}" for number in range(count)]


async def sample_held(
    engine: ServerEngine, servers: Sequence[StubServer], ids: Sequence[str], **changed: Any
) -> list[Completion]:
    """As `sample_all`, where no request is answered before the last one has come."""
    asked = sum(len(server.asked) for server in servers)
    hold(servers)
    work = asyncio.create_task(sample_all(engine, ids, **changed))
    await until(lambda: sum(len(server.asked) for server in servers) == asked + len(ids))
    release(servers)
    return await work


def hold(servers: Sequence[StubServer]) -> None:
    for server in servers:
        server.is_held = True


def release(servers: Sequence[StubServer]) -> None:
    for server in servers:
        server.is_held = False


def stand_still(server: StubServer) -> None:
    """From now on no request for tokens is answered, probes neither; its health is well."""
    server.is_held = server.is_stuck = True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it is about another thread's state
            await asyncio.sleep(0.01)
