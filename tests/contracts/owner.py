"""A process that owns sandboxes, for tests that end it: `python -m tests.contracts.owner BACKEND COUNT TOKEN`.

In each sandbox something runs that wants to live on. It prints `running` and the pool's process id when all of it
runs, and then waits.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import cast

from envs.sandbox.base import SandboxSpec
from envs.sandbox.open import Backend, open_factory
from envs.sandbox.pool_client import PoolFactory
from tests.contracts.sandboxes import eventually, processes_named

STUBBORN = "trap '' TERM INT HUP; (setsid sleep {token} &); sleep {token}"


async def main(backend: Backend, count: int, token: str) -> None:
    factory = await open_factory(backend, warm=2)
    try:
        sandboxes = [await factory.start(SandboxSpec(files={"a": b"1"})) for _ in range(count)]
        running = [
            asyncio.ensure_future(sandbox.exec(STUBBORN.format(token=token), timeout_s=600)) for sandbox in sandboxes
        ]
        assert await eventually(lambda: processes_named(f"sleep\0{token}") == 2 * count)
        assert isinstance(factory, PoolFactory)
        print("running", (await factory.pool_state())["pid"], flush=True)
        if token.endswith("7"):
            raise RuntimeError("a fault of the trainer's")
        await asyncio.gather(*running)
    finally:
        await factory.close()


if __name__ == "__main__":
    # A shell starts what runs in its background with SIGINT ignored, and so do its tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main(cast(Backend, sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
