"""The engine over servers: what is refused at the start, where requests go, and what becomes of them when servers die.

The servers are stubs with a made-up model (`stub_server`), over real HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data.ledger import Ledger
from data.types import Completion, SamplingParams
from rollouts.config import EngineConfig
from rollouts.engine import EngineError, EngineLoad, RecordingEngine
from rollouts.engine_server import ServerEngine
from rollouts.open_engine import open_engine
from rollouts.server_patience import Patience
from tests.rollouts.stub_server import VOCAB_SIZE, StubServer, sample, save_stub_model

SOON = Patience(
    health_interval_s=0.05, health_timeout_s=20, request_timeout_s=60, backoff_s=0.02, recovery_s=0.5, attempts=4
)
"""Looks often, and waits long: the machine may be busy, and no test here is about how fast a stub answers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def connect(model: Path) -> Iterator[Callable[..., ServerEngine]]:
    """Makes engines, and closes them."""
    made: list[ServerEngine] = []

    def make(*servers: StubServer, **changed: Any) -> ServerEngine:
        settings: dict[str, Any] = {"model": model, "max_context_tokens": 256, "patience": SOON} | changed
        made.append(ServerEngine([server.address for server in servers], **settings))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.close())


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


# What is refused at the start, and how.


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"processed": False}, r"logprobs are raw.*start it with --logprobs-mode processed_logprobs"),
        ({"scale_out": False, "token_ids": False}, r"no token ids.*--enable-scale-out"),
        ({"name": "models/other"}, r"it serves other and not stub.*--served-model-name stub"),
        ({"max_model_len": 128}, r"holds 128 tokens, .*256; start it with --max-model-len 256"),
        ({"vocab_size": 63}, r"Token id 63 is out of vocabulary.*a model whose vocabulary has 64 ids"),
        ({"vocab_size": 70}, r"its vocabulary is larger than that of stub"),
        ({"version": "main"}, r"calls its weights 'main'"),
    ],
)
def test_a_server_that_would_be_wrong_is_refused_with_how_to_start_it(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], changed: dict[str, Any], says: str
) -> None:
    server = stub(**changed)
    with pytest.raises((ValueError, EngineError), match=says) as caught:
        connect(server)
    assert server.address in str(caught.value) or "version" in changed
    assert "\n" not in str(caught.value)


def test_an_adapter_that_is_not_served_is_refused(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    with pytest.raises(ValueError, match=r"no adapter 'mine' \(it has: yours\).*--lora-modules mine=FOLDER"):
        connect(stub(adapters=["yours"]), adapter="mine")


def test_the_adapter_is_asked_for_by_name(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub(adapters=["mine"])
    engine = connect(server, adapter="mine")
    run_one(engine)
    asyncio.run(engine.score([5, 6, 7]))
    assert {body["model"] for body in server.asked} == {"mine"}
    with pytest.raises(EngineError, match="adapter 'mine'"):
        asyncio.run(engine.load_weights({}, 1))


def test_logits_are_no_logprobs(stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]) -> None:
    server = stub()

    def add_two(answer: dict[str, Any]) -> None:
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            entry["logprob"] += 2

    server.change = add_two
    with pytest.raises(ValueError, match="no log-probabilities"):
        connect(server)


def test_two_servers_with_other_weights_under_one_name_are_refused(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    with pytest.raises(ValueError, match="differ from those of"):
        connect(stub(), stub(bias=3))


def test_a_server_that_is_not_there_is_one_line(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    gone = stub()
    gone.kill()
    with pytest.raises(EngineError, match=r"no connection.*python -m scripts.serve") as caught:
        connect(stub(), gone)
    assert gone.address in str(caught.value)


def test_what_answers_and_is_no_vllm_is_refused(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    server.models = lambda: {"object": "list"}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no vLLM server"):
        connect(server)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kind": "server"}, "engine.kind is server and engine.servers names 0"),
        ({"kind": "vllm", "servers": ("http://h:1",)}, "engine.kind is vllm and engine.servers names 1"),
        ({"kind": "server", "servers": ("localhost:8000",)}, "is no address; write http://HOST:PORT"),
        ({"kind": "server", "servers": ("http://h:1", "http://h:1/")}, "name each server once"),
    ],
)
def test_a_configuration_that_names_no_servers_or_too_many(model: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_engine(EngineConfig(**config), model=str(model))


def test_open_engine_connects(stub: Callable[..., StubServer], model: Path) -> None:
    server = stub()

    async def inside_a_loop() -> Completion:
        config = EngineConfig(kind="server", servers=(server.address + "/v1",), max_context_tokens=256)
        engine = open_engine(config, model=str(model), policy_version=4)
        try:
            return await engine.generate("g/0/0", [5], sampling())
        finally:
            await engine.close()

    assert asyncio.run(inside_a_loop()).policy_version == (4,) * 6
    assert server.connections == 0


# What a request is, and what an answer must be.


@pytest.mark.parametrize("scale_out", [True, False])
def test_ids_logprobs_and_scores_are_the_servers(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], scale_out: bool
) -> None:
    server = stub(scale_out=scale_out)
    engine = connect(server)
    completion = run_one(engine, seed=7, temperature=0.7, max_tokens=9)
    ids, logprobs, _ = sample([5, 6], {"seed": 7, "temperature": 0.7, "max_tokens": 9})
    assert completion.token_ids == tuple(ids)
    assert completion.logprobs == pytest.approx(logprobs)
    assert completion.cached_prompt_tokens == 1
    stop = ids[4]
    stopped = run_one(engine, seed=7, temperature=0.7, max_tokens=9, stop_token_ids=(stop,))
    assert (stopped.token_ids, stopped.finish_reason) == (tuple(ids[: ids.index(stop) + 1]), "stop")
    scores = asyncio.run(engine.score([5, 6, 7, 7]))
    assert len(scores) == 3
    assert all(score < 0 for score in scores)
    path = "/inference/v1/generate" if scale_out else "/v1/completions"
    assert set(server.posts[2:]) == {path}


@pytest.mark.parametrize("scale_out", [True, False])
def test_every_sampling_parameter_is_sent(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], scale_out: bool
) -> None:
    """For one that is left out a server takes the default of the model's folder."""
    server = stub(scale_out=scale_out)
    wanted: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    } | {
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    run_one(connect(server), seed=-1, structural_tag='{"x": 1}', stop_token_ids=(), **wanted)
    body = server.asked[0].get("sampling_params", server.asked[0])
    assert {name: body[name] for name in wanted} == wanted
    assert body["seed"] == (1 << 63) - 1  # vLLM reads -1 as none
    assert body["ignore_eos"] is True
    assert body["structured_outputs"] == {"structural_tag": '{"x": 1}'}
    assert (body["max_tokens"], body["stop_token_ids"]) == (6, [])


def test_case_c25_completions_without_a_seed_get_one_each_whatever_the_server(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """A server has a seed of its own, the same in every server, and would give all of them the same tokens."""
    servers = [stub(), stub()]
    completions = asyncio.run(sample_held(connect(*servers), servers, trajectories(8), seed=None))
    seeds = [body["sampling_params"]["seed"] for server in servers for body in server.asked]
    assert len(set(seeds)) == len(seeds) == 8
    assert len({completion.token_ids for completion in completions}) == 8


def wrong_reason(answer: dict[str, Any]) -> None:
    answer["choices"][0]["finish_reason"] = "repetition"


def without_the_stop_token(answer: dict[str, Any]) -> None:
    answer["choices"][0]["finish_reason"] = "stop"


def one_logprob_less(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"].pop()


def one_token_less(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"].pop()
    answer["choices"][0]["token_ids"].pop()
    answer["choices"][0]["weight_versions"][0]["end"] -= 1


def no_logprob(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["content"][2]["logprob"] = -9999.0


def another_prompt(answer: dict[str, Any]) -> None:
    answer["usage"]["prompt_tokens"] += 1


def a_gap_between_versions(answer: dict[str, Any]) -> None:
    answer["choices"][0]["weight_versions"][0]["start"] = 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wrong_reason, "'repetition'; only stop and length"),
        (without_the_stop_token, "none of the stop ids.*--generation-config vllm"),
        (one_logprob_less, "logprobs are of other tokens"),
        (one_token_less, "cut a completion after 5 tokens, 6 were asked for"),
        (no_logprob, "-9999.0 as the logprob of a sampled token"),
        (another_prompt, "after 3 prompt tokens, 2 were sent"),
        (a_gap_between_versions, "weight versions leave tokens out"),
        (dict.clear, "something else than vLLM"),
    ],
)
def test_case_a36_an_answer_that_is_not_whole_is_an_error_and_not_asked_for_again(
    stub: Callable[..., StubServer],
    connect: Callable[..., ServerEngine],
    change: Callable[[dict[str, Any]], None],
    says: str,
) -> None:
    server = stub()
    engine = connect(server)
    server.change = change
    with pytest.raises(EngineError, match=says) as caught:
        run_one(engine)
    assert f"completion g/0/0: server {server.address}: " in str(caught.value)
    assert len(server.asked) == 1


def test_a_refused_request_is_not_sent_again(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """It would be refused everywhere and every time."""
    servers = [stub(), stub()]
    engine = connect(*servers)
    for server in servers:
        server.faults.append(400)
    with pytest.raises(EngineError, match="answered 400: the stub was told to"):
        run_one(engine)
    assert sum(len(server.asked) for server in servers) == 1
    assert engine.counts.resent == 0


# Where requests go.


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


# What becomes of requests when servers fail.


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
    engine = connect(*servers, patience=Patience(request_timeout_s=1.0, backoff_s=0.02))
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
    engine = connect(server, patience=Patience(request_timeout_s=2.0, backoff_s=0.02, recovery_s=60.0))
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
    stub: Callable[..., StubServer], model: Path
) -> None:
    server = stub()
    config = EngineConfig(kind="server", servers=(server.address,), max_context_tokens=256)

    async def scenario() -> None:
        engine = open_engine(config, model=str(model), wall_clock_s=8.0)
        stand_still(server)
        try:
            async with asyncio.timeout(8.0):
                await engine.generate("t/0", [5], sampling())
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"no server came back within 2 s .*no answer within"):
        asyncio.run(scenario())


@pytest.mark.parametrize("wall_clock_s", [1.0, 120.0, 1e5])
def test_servers_are_waited_for_less_than_a_trajectory_has(wall_clock_s: float) -> None:
    usual, patience = Patience(), Patience.within(wall_clock_s)
    assert patience.request_timeout_s + patience.recovery_s <= 0.75 * wall_clock_s
    assert patience.request_timeout_s <= usual.request_timeout_s
    assert patience.recovery_s <= usual.recovery_s


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


# Versions and weights.


def test_every_token_says_the_version_that_sampled_it_and_old_ones_are_counted(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [stub(version="7"), stub(version="5")]
    with caplog.at_level(logging.WARNING, logger="rollouts"):
        engine = connect(*servers)
    assert "servers have different weights" in caplog.text
    assert engine.policy_version == 7
    completions = asyncio.run(sample_all(engine, ["a/0", "b/0"]))
    assert sorted(c.policy_version for c in completions) == [(5,) * 6, (7,) * 6]
    assert engine.tokens_of_older_weights == 6


def test_a_version_that_changes_within_a_completion(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub(version="3")
    engine = connect(server)

    def update(answer: dict[str, Any]) -> None:
        spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 6}]
        answer["choices"][0]["weight_versions"] = spans

    server.change = update
    assert run_one(engine).policy_version == (3, 3, 4, 4, 4, 4)
    assert engine.policy_version == 4


def weights() -> dict[str, torch.Tensor]:
    return {"model.embed_tokens.weight": torch.ones(VOCAB_SIZE, 2)}


def test_weights_reach_every_server_and_their_version_every_token(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, weights_folder=tmp_path)
    servers[1].caches_in_use = 2
    asyncio.run(engine.load_weights(weights(), 3))
    assert [server.version for server in servers] == ["3", "3"]
    assert engine.policy_version == 3
    assert run_one(engine).policy_version == (3,) * 6


def test_a_server_that_died_is_not_taken_back_with_the_weights_of_its_folder(
    stub: Callable[..., StubServer],
    connect: Callable[..., ServerEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, weights_folder=tmp_path)
    asyncio.run(engine.load_weights(weights(), 3))

    async def scenario() -> None:
        servers[0].kill()
        await until(lambda: engine.counts.lost == 1)
        servers[0].start()
        await until(lambda: "stays out" in caplog.text)

    with caplog.at_level(logging.WARNING, logger="rollouts"):
        asyncio.run(scenario())
    assert "its weights are 'default', those of the run are of step 3" in caplog.text
    assert engine.load.capacity == 64
    asyncio.run(engine.load_weights(weights(), 4))  # it gets the next ones with the others
    assert engine.load.capacity == 128


def test_a_server_that_is_gone_gets_no_weights_and_then_nobody_does(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, weights_folder=tmp_path)
    servers[0].kill()
    with pytest.raises(EngineError, match=r"1 of 2 servers did not take the weights: .*no connection"):
        asyncio.run(engine.load_weights(weights(), 3))
    assert servers[1].version == "default"
    assert run_one(engine).policy_version == (0,) * 6


@pytest.mark.parametrize("fault", [500, "drop", "hang"])
def test_case_c12_a_server_that_fails_in_a_sync_is_an_error_in_time_and_nothing_is_sampled_from_it(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], tmp_path: Path, fault: Any
) -> None:
    servers = [stub(), stub()]
    patience = Patience(health_interval_s=0.05, request_timeout_s=1.0, backoff_s=0.02, recovery_s=5)
    engine = connect(*servers, weights_folder=tmp_path, patience=patience)
    servers[1].faults.append(fault)
    with pytest.raises(EngineError, match=f"1 of 2 servers did not take the weights: server {servers[1].address}"):
        asyncio.run(engine.load_weights(weights(), 3))
    assert engine.policy_version == 0
    with pytest.raises(EngineError, match="weights are in doubt"):
        run_one(engine)
    asyncio.run(engine.load_weights(weights(), 3))
    assert run_one(engine).policy_version == (3,) * 6


def test_weights_are_refused_where_servers_do_not_take_them(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        asyncio.run(connect(stub()).load_weights(weights(), 1))
    closed = connect(stub(dev_mode=False), weights_folder=tmp_path)
    with pytest.raises(EngineError, match="/reset_prefix_cache answered 404"):
        asyncio.run(closed.load_weights(weights(), 1))
    assert run_one(closed).policy_version == (0,) * 6


def test_weights_are_refused_while_requests_run(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    server = stub()
    engine = connect(server, weights_folder=tmp_path)
    server.is_held = True

    async def load() -> None:
        work = asyncio.create_task(engine.generate("t/0", [5], sampling()))
        await until(lambda: server.running == 1)
        with pytest.raises(EngineError, match="while requests run"):
            await engine.load_weights(weights(), 1)
        server.is_held = False
        await work

    asyncio.run(load())
