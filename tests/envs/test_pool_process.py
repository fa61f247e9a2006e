"""Does the pool's process answer every question, whatever fails, and leave what is in use when it ends?

The launcher is scripted; `tests/contracts/test_sandbox_pool.py` has the real ones.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sandbox.base import SandboxSpec
from envs.sandbox.pool import MAX_STARTING
from envs.sandbox.pool_process import PoolServer
from envs.sandbox.pool_wire import MAX_MESSAGE_BYTES, new_socket, receive_message, send_message, spec_as_json
from tests.envs.scripted_launcher import ScriptedLauncher
from tests.envs.test_pool import FAULTS

SPEC = spec_as_json(SandboxSpec())


class Client:
    """One connection; answers come in any order."""

    def __init__(self, address: str) -> None:
        self.connected = new_socket()
        self.connected.connect(address)
        self.asked = 0

    async def send(self, question: str, **details: Any) -> None:
        self.asked += 1
        await send_message(self.connected, {"id": self.asked, "ask": question, **details})

    async def receive(self) -> dict[str, Any] | None:
        received = await receive_message(self.connected)
        if received is None:
            return None
        for file in received[1]:
            os.close(file)
        return received[0]

    async def ask(self, question: str, **details: Any) -> dict[str, Any]:
        await self.send(question, **details)
        answer = await self.receive()
        assert answer is not None
        assert answer["id"] == self.asked
        return answer

    async def start(self) -> dict[str, Any]:
        return await self.ask("start", spec=SPEC, warm=0)


def with_server(use: Callable[[PoolServer, ScriptedLauncher, str], Awaitable[None]]) -> ScriptedLauncher:
    """Run `use` with a server and its address; the server is stopped afterwards, and has returned then."""

    async def main() -> ScriptedLauncher:
        address = f"\0agentgrad-test-{uuid.uuid4().hex}"
        listener = new_socket()
        listener.bind(address)
        listener.listen()
        launcher = ScriptedLauncher()
        server = PoolServer(launcher)
        serving = asyncio.ensure_future(server.serve(listener))
        try:
            await use(server, launcher, address)
        finally:
            server.stopping.set()
            await serving
        return launcher

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not come true")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(["start", "check", "end", "why", "nonsense", "large", "leave"]), max_size=8),
    st.sampled_from(FAULTS),
)
def test_every_question_gets_an_answer(questions: list[str], fault: Exception) -> None:
    async def use(server: PoolServer, launcher: ScriptedLauncher, address: str) -> None:
        client = Client(address)
        for question in questions:
            launcher.fault = None if question in ("large", "why", "leave") else fault
            launcher.variables = {"LARGE": "x" * MAX_MESSAGE_BYTES} if question == "large" else {}
            asked = "start" if question == "large" else question
            answer = await client.ask(asked, spec=SPEC, warm=0, sandbox="another pool's")
            assert ("error" in answer) == (question not in ("why", "leave"))
            assert str(fault) in answer.get("error", "") or question in ("large", "why", "nonsense", "leave")
        launcher.fault, launcher.variables = None, {}
        sandbox = (await client.start())["sandbox"]
        assert "error" not in await client.ask("end", sandbox=sandbox)
        client.connected.close()

    assert with_server(use).alive == 0


def test_what_is_in_use_goes_on_when_the_pool_ends() -> None:
    """Its client sees the end of the pool and asks the next one; what is warm or was never handed over ends."""

    async def use(server: PoolServer, launcher: ScriptedLauncher, address: str) -> None:
        client, other = Client(address), Client(address)
        used = {(await one.start())["sandbox"] for one in (client, client, other)}
        await client.ask("check", spec=SPEC, warm=3)
        await until(lambda: launcher.alive == 6)
        launcher.may_start.clear()
        for _ in range(30):
            await client.send("start", spec=SPEC, warm=3)
        await until(lambda: launcher.at_once > 0)
        server.stopping.set()
        while (answer := await client.receive()) is not None:
            used.add(answer["sandbox"])  # one that was warm
        assert await other.receive() is None
        launcher.may_start.set()
        await until(lambda: {one.name for one in launcher.launched if not one.ended} == used)
        for one in launcher.launched:
            assert one.ended == (one.name not in used)

    with_server(use)


def test_what_a_dead_client_asked_for_is_not_done() -> None:
    async def use(server: PoolServer, launcher: ScriptedLauncher, address: str) -> None:
        client, other = Client(address), Client(address)
        await client.start()
        kept = (await other.start())["sandbox"]
        launcher.may_start.clear()
        for _ in range(40):
            await client.send("start", spec=SPEC, warm=0)
        await until(lambda: launcher.at_once == MAX_STARTING)
        client.connected.close()
        await until(lambda: launcher.alive == 1)
        launcher.may_start.set()
        await until(lambda: launcher.at_once == 0)
        assert "error" not in await other.ask("end", sandbox=kept)
        await until(lambda: launcher.alive == 0)
        assert launcher.tries <= 2 + MAX_STARTING

    with_server(use)


def test_a_client_that_is_gone_before_it_speaks_is_no_client() -> None:
    async def use(server: PoolServer, launcher: ScriptedLauncher, address: str) -> None:
        for _ in range(5):
            silent = new_socket()
            silent.connect(address)
            silent.shutdown(socket.SHUT_RDWR)
            silent.close()
        client = Client(address)
        assert (await client.start())["warm"] is False
        client.connected.close()
        await until(lambda: launcher.alive == 0)

    with_server(use)
