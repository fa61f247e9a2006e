"""What becomes of a request whose server fails, dies or hangs?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.ledger import Ledger
from data.types import Completion
from rollouts.config import EngineConfig
from rollouts.engine import EngineError, RecordingEngine
from rollouts.engine_server import ServerEngine
from rollouts.open_engine import open_engine
from rollouts.server_patience import Patience
from tests.rollouts.stub_fleet import hold, release, run_one, sample_all, sampling, stand_still, trajectories, until
from tests.rollouts.stub_server import StubServer, sample


@pytest.mark.parametrize("fault", ["drop", "abort", 500, 502, 503, 429])
def test_a_fault_is_made_good_by_another_server_with_the_same_seed(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], fault: Any
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers)
    expected = run_one(engine, seed=5)
    for server in servers:
        server.asked.clear()
    home = next(server for server in servers if server.posts.count("/inference/v1/generate") > 4)
    home.faults.append(fault)
    again = run_one(engine, seed=None)
    assert len(again.token_ids) == 6
    assert [len(server.asked) for server in servers] == [1, 1]
    seeds = {body["sampling_params"]["seed"] for server in servers for body in server.asked}
    assert len(seeds) == 1  # drawn once, also where the caller gave none
    assert engine.counts.resent == 1
    assert run_one(engine, seed=5) == expected
    assert engine.counts.lost == 0  # its health was well all the time


def test_attempts_are_bounded_and_the_error_has_every_cause(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    engine = connect(server)
    server.faults.extend([500, 503, "drop", 500, 500, 500])
    with pytest.raises(EngineError, match=r"given up after 4 attempts \(.*500.*503.*broke.*500") as caught:
        run_one(engine)
    assert "\n" not in str(caught.value)
    assert len(server.asked) == 4


def test_a_server_that_dies_loses_nothing_and_doubles_nothing(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [stub(), stub(), stub()]
    ledger = Ledger()
    engine = connect(*servers)
    recording = RecordingEngine(engine, ledger)
    hold(servers)

    async def lose_one() -> list[Completion]:
        work = asyncio.create_task(sample_all(recording, trajectories(48)))
        await until(lambda: sum(server.running for server in servers) == 48)
        servers[0].kill()
        release(servers)
        return await work

    with caplog.at_level(logging.WARNING, logger="rollouts"):
        completions = asyncio.run(lose_one())
    assert [c.completion_id for c in completions] == trajectories(48)
    assert sorted(entry.completion_id for entry in ledger) == sorted(trajectories(48))  # it refuses a double
    for number, completion in enumerate(completions):
        assert completion.token_ids == tuple(sample([5, 6], {"seed": number, "max_tokens": 6})[0])
    counts = engine.counts
    assert (counts.lost, counts.returned, counts.resent) == (1, 0, 16)
    assert f"server {servers[0].address} is out" in caplog.text
    assert [server.aborted for server in servers[1:]] == [0, 0]


def no_logprobs(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"] = None


def a_logprob_that_is_none(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")


def another_prompt(answer: dict[str, Any]) -> None:
    answer["usage"]["prompt_tokens"] += 1


def a_token_that_is_none(answer: dict[str, Any]) -> None:
    choice = answer["choices"][0]
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = 64


def a_version_that_is_none(answer: dict[str, Any]) -> None:
    answer["choices"][0]["weight_versions"][0]["version"] = "new"


def when_sampling(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Its checks, which ask for one token, go on passing."""

    def change_it(answer: dict[str, Any]) -> None:
        if len(answer["choices"][0]["token_ids"]) > 1:
            change(answer)

    return change_it


@pytest.mark.parametrize(
    "wrong",
    [
        *(no_logprobs, a_logprob_that_is_none, another_prompt, a_token_that_is_none, a_version_that_is_none),
        *("garbage", 301, 400, 401, 403, 404, 422),
    ],
)
def test_a_server_that_answers_wrongly_swallows_no_work(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], wrong: Any
) -> None:
    """It answers at once, so it would be the emptiest all the time; and it passes its check whenever it is asked."""
    broken, whole = [stub() for _ in range(1 if wrong in (400, 422) else 2)], stub()  # two that refuse it are believed
    engine = connect(*broken, whole)
    expected = [tuple(sample([5, 6], {"seed": number, "max_tokens": 6})[0]) for number in range(40)]
    for server in broken:
        if isinstance(wrong, int | str):
            server.faults.extend([wrong] * 1000)
        else:
            server.change = when_sampling(wrong)

    async def one_after_the_other() -> list[Completion]:
        ids = [f"t{number}/0/0" for number in range(40)]
        return [await engine.generate(one, [5, 6], sampling(seed=number)) for number, one in enumerate(ids)]

    assert [c.token_ids for c in asyncio.run(one_after_the_other())] == expected
    assert engine.counts.lost >= len(broken)
    # Each time that one is back it gets a request, and ever later.
    assert sum(len(server.asked) for server in broken) == engine.counts.resent < 40


def test_one_wrong_answer_is_the_doing_of_its_request(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """Logits that overflow for one prompt take no server, with all that it samples, out."""
    servers = [stub(), stub()]
    engine = connect(*servers)
    for number in range(5):
        servers[0].faults.append("garbage")
        for name in "abcd":  # the first one meets it, another one is answered
            assert len(run_one(engine, f"{name}{number}/0/0").token_ids) == 6
    assert not servers[0].faults
    assert (engine.counts.lost, engine.counts.resent) == (0, 5)


def test_a_server_without_another_one_stays_however_wrong_it_is(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """What else it samples goes on."""
    server = stub()
    engine = connect(server)
    server.faults.extend(["garbage"] * 5)
    for _ in range(5):
        with pytest.raises(EngineError, match="something else than vLLM"):
            run_one(engine)
    assert len(run_one(engine).token_ids) == 6
    assert (engine.counts.lost, engine.counts.resent, len(server.asked)) == (0, 0, 6)


def test_a_server_that_hangs_is_found_by_its_health_and_its_requests_go_elsewhere(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, patience=Patience(health_interval_s=0.05, health_timeout_s=1.0, backoff_s=0.02))
    servers[0].health = "hang"
    servers[0].faults.extend(["hang"] * 8)
    completions = asyncio.run(sample_all(engine, [f"t{number}/0" for number in range(8)]))
    assert len({c.completion_id for c in completions}) == 8
    assert engine.counts.lost >= 1
    assert len(servers[1].asked) == 8


def test_a_request_that_never_ends_takes_its_server_out(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """Its health is well, and its model stands still."""
    servers = [stub(), stub()]
    engine = connect(*servers, patience=Patience(request_timeout_s=4.0, backoff_s=0.02))
    stand_still(servers[0])
    completions = asyncio.run(sample_all(engine, ["a/0", "b/0"]))
    assert len(completions) == 2
    assert engine.counts.lost == 1


def test_a_request_that_never_ends_goes_elsewhere_and_a_server_that_gives_tokens_stays(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, patience=Patience(request_timeout_s=4.0, backoff_s=0.02))
    servers[0].faults.append("hang")
    completions = asyncio.run(sample_all(engine, ["a/0", "b/0"]))
    assert len(completions) == 2
    assert (engine.counts.resent, engine.counts.lost) == (1, 0)


def test_a_model_that_stands_still_is_found_though_the_request_was_cancelled_before(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """As the clock of a trajectory does, turn after turn."""
    server = stub()
    engine = connect(server, patience=Patience(request_timeout_s=4.0, backoff_s=0.02, recovery_s=60.0))
    stand_still(server)
    probes = len(server.posts)

    async def scenario() -> Completion:
        work = asyncio.create_task(engine.generate("t/0", [5], sampling()))
        await until(lambda: len(server.posts) >= probes + 2)  # the request, and the probe
        work.cancel()
        await until(lambda: engine.counts.lost == 1)
        server.is_held = server.is_stuck = False
        return await engine.generate("t/1", [5], sampling())

    assert len(asyncio.run(scenario()).token_ids) == 6
    assert (engine.counts.lost, engine.counts.returned) == (1, 1)


def test_a_hung_server_is_the_engines_fault_before_the_clock_of_the_trajectory_ends(
    stub: Callable[..., StubServer], stub_model: Path
) -> None:
    server = stub()
    config = EngineConfig(kind="server", servers=(server.address,), max_context_tokens=256)

    async def scenario() -> None:
        engine = open_engine(config, model=str(stub_model), wall_clock_s=8.0)
        stand_still(server)
        try:
            async with asyncio.timeout(8.0):
                await engine.generate("t/0", [5], sampling())
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"(no server came back within 2 s|t/0 was out of time) .*no answer within"):
        asyncio.run(scenario())


@pytest.mark.parametrize("wall_clock_s", [8.0, 120.0, 1e5])
def test_servers_are_waited_for_less_than_a_trajectory_has(wall_clock_s: float) -> None:
    usual, patience = Patience(), Patience.within(wall_clock_s)
    assert patience.request_timeout_s + patience.recovery_s <= 0.75 * wall_clock_s
    assert patience.request_timeout_s <= usual.request_timeout_s
    assert patience.recovery_s <= usual.recovery_s


@pytest.mark.parametrize("wall_clock_s", [0.1, 1.0])
def test_a_tiny_clock_blames_no_server_that_is_well(
    stub: Callable[..., StubServer], stub_model: Path, wall_clock_s: float
) -> None:
    """It ends the trajectory, and the server stays."""
    server = stub()
    config = EngineConfig(kind="server", servers=(server.address,), max_context_tokens=256)
    engine = open_engine(config, model=str(stub_model), wall_clock_s=wall_clock_s)
    assert isinstance(engine, ServerEngine)
    server.is_held = True

    async def scenario() -> None:
        try:
            async with asyncio.timeout(wall_clock_s):
                await engine.generate("t/0", [5], sampling())
        finally:
            await engine.close()

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    assert (engine.counts.lost, engine.counts.resent) == (0, 0)
