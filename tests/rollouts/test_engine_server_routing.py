"""Which server does a request go to, and how much do they hold together?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from rollouts.engine import EngineLoad
from rollouts.engine_server import ServerEngine
from tests.rollouts.stub_fleet import hold, release, run_one, sample_all, sample_held, trajectories, until
from tests.rollouts.stub_server import StubServer


def test_turns_of_a_trajectory_go_to_one_server_and_siblings_begin_there_too(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub(), stub()]
    engine = connect(*servers, max_concurrent=16)
    for turn in range(3):
        before = [len(server.asked) for server in servers]
        asyncio.run(sample_held(engine, servers, trajectories(12, turn)))
        assert [len(server.asked) - n for server, n in zip(servers, before, strict=True)] == [4, 4, 4]
    for server in servers:
        seeds = Counter(body["sampling_params"]["seed"] for body in server.asked)
        assert set(seeds.values()) == {3}  # the seed is the trajectory's number here
        assert len({seed // 4 for seed in seeds}) == 1  # and four of them are a group


def test_a_large_group_is_spread_when_its_server_is_full(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, max_concurrent=8)
    asyncio.run(sample_held(engine, servers, [f"step-0/task/{sibling}/0" for sibling in range(16)]))
    assert all(5 <= len(server.asked) <= 11 for server in servers)


def test_load_is_the_sum_over_the_servers_that_are_up(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, max_concurrent=4)
    assert engine.load == EngineLoad(running=0, waiting=0, capacity=8)
    hold(servers)

    async def watch() -> EngineLoad:
        work = asyncio.create_task(sample_all(engine, [f"t{number}/0" for number in range(10)]))
        await until(lambda: sum(len(server.asked) for server in servers) == 10)
        seen = engine.load
        servers[1].kill()
        await until(lambda: engine.load.capacity == 4)
        release(servers)
        await work
        return seen

    assert asyncio.run(watch()) == EngineLoad(running=8, waiting=2, capacity=8)
    assert engine.load == EngineLoad(running=0, waiting=0, capacity=4)


def test_it_serves_several_event_loops_one_after_the_other(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    engine = connect(stub())
    assert run_one(engine) == run_one(engine)
