"""What is waited for when servers are gone, who comes back, and how does it all end?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from data.types import Completion
from rollouts.engine import EngineError
from rollouts.engine_server import ServerEngine
from rollouts.server_patience import Patience
from tests.rollouts.stub_fleet import hold, run_one, sample_all, sampling, trajectories, until
from tests.rollouts.stub_server import StubServer


def test_a_server_comes_back_when_it_is_well_again(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers)

    async def scenario() -> None:
        servers[0].kill()
        await until(lambda: engine.counts.lost == 1)
        await sample_all(engine, trajectories(8))
        assert not servers[0].asked
        servers[0].start()
        await until(lambda: engine.counts.returned == 1)
        await sample_all(engine, trajectories(8, turn=1))

    asyncio.run(scenario())
    assert not servers[0].asked  # those trajectories have moved, and their prefixes with them
    asyncio.run(sample_all(engine, [f"new{number}/0" for number in range(8)]))
    assert servers[0].asked


def test_requests_wait_while_no_server_is_up(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    engine = connect(server, patience=Patience(health_interval_s=0.05, backoff_s=0.02, recovery_s=10))

    async def scenario() -> list[Completion]:
        server.kill()
        await until(lambda: engine.counts.lost == 1)
        work = asyncio.create_task(sample_all(engine, trajectories(5)))
        await asyncio.sleep(0.1)
        assert not work.done()
        server.start()
        return await work

    assert len(asyncio.run(scenario())) == 5


def test_when_all_are_gone_the_error_has_the_cause_of_each(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers)
    for server in servers:
        server.kill()
    with pytest.raises(EngineError, match=r"no server came back within 0.5 s") as caught:
        run_one(engine)
    assert all(f"{server.address}: no connection" in str(caught.value) for server in servers)


def test_a_server_that_comes_back_as_another_one_stays_out(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers)

    async def scenario() -> None:
        servers[0].kill()
        await until(lambda: engine.counts.lost == 1)
        servers[0].processed = False
        servers[0].start()
        await until(lambda: "stays out" in caplog.text)
        await asyncio.sleep(0.1)

    with caplog.at_level(logging.WARNING, logger="rollouts"):
        asyncio.run(scenario())
    assert engine.counts.returned == 0
    assert caplog.text.count("stays out") == 1  # once, not at every look
    assert "logprobs are raw" in caplog.text


def test_cancelling_closes_the_request(stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]) -> None:
    server = stub()
    engine = connect(server)
    server.is_held = True

    async def cancel() -> None:
        work = asyncio.create_task(engine.generate("t/0", [5], sampling()))
        await until(lambda: server.running == 1)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await until(lambda: server.running == 0)

    asyncio.run(cancel())
    assert server.aborted == 1
    assert engine.load.running == 0
    assert engine.counts.resent == 0


def test_close_ends_what_runs_with_an_error_and_leaves_no_connection(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers)
    hold(servers)

    async def close() -> list[Any]:
        work = [asyncio.create_task(engine.generate(f"t{n}/0", [5], sampling())) for n in range(6)]
        await until(lambda: sum(server.running for server in servers) == 6)
        await engine.close()
        await engine.close()
        return await asyncio.gather(*work, return_exceptions=True)

    outcomes = asyncio.run(close())
    assert all(isinstance(outcome, EngineError) and "closed" in str(outcome) for outcome in outcomes)
    asyncio.run(until(lambda: sum(server.connections for server in servers) == 0))
    with pytest.raises(EngineError, match="closed"):
        run_one(engine)


def test_what_servers_cost_is_said_once_at_the_end(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers)
    for server in servers:
        server.faults.append("drop")
    run_one(engine)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="rollouts"):
        asyncio.run(engine.close())
        asyncio.run(engine.close())
    said = "what servers did in all: requests sent again: 2; servers lost: 0, back again: 0"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_nothing_is_said_at_the_end_where_nothing_happened(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], caplog: pytest.LogCaptureFixture
) -> None:
    server = stub()
    engine = connect(server)
    run_one(engine)
    hold([server])

    async def close_while_one_runs() -> None:
        work = asyncio.create_task(engine.generate("t/0", [5], sampling()))
        await until(lambda: server.running == 1)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await work

    with caplog.at_level(logging.WARNING, logger="rollouts"):
        asyncio.run(close_while_one_runs())
    assert not caplog.records


@pytest.mark.parametrize(("count", "says"), [(1, "wait until a server is back"), (2, "are sent to another one")])
def test_a_server_that_is_lost_says_where_its_requests_go(
    stub: Callable[..., StubServer],
    connect: Callable[..., ServerEngine],
    caplog: pytest.LogCaptureFixture,
    count: int,
    says: str,
) -> None:
    servers = [stub() for _ in range(count)]
    engine = connect(*servers)
    with caplog.at_level(logging.WARNING, logger="rollouts"):
        servers[0].kill()
        asyncio.run(until(lambda: engine.counts.lost == 1))
    assert f"server {servers[0].address} is out (no connection" in caplog.text
    assert f"; its requests {says}" in caplog.text
