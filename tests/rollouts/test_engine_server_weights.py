"""Whose weights sampled a token, and how do new ones reach every server?"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.types import Completion
from rollouts.engine import EngineError
from rollouts.engine_adapter import AdapterWeights
from rollouts.engine_server import ServerEngine
from rollouts.server_patience import Patience
from tests.rollouts.stub_fleet import run_one, sample_all, sampling, until
from tests.rollouts.stub_server import VOCAB_SIZE, StubServer, save_stub_model


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
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, takes_weights=True)
    report = asyncio.run(engine.load_weights(weights(), 3))
    assert (report.tensors, report.changed, report.caches_dropped, report.sent_bytes) == (1, None, 2, VOCAB_SIZE * 8)
    for server in servers:
        assert torch.equal(server.weights["model.embed_tokens.weight"], weights()["model.embed_tokens.weight"])
    assert [server.version for server in servers] == ["3", "3"]
    assert not any(server.is_paused for server in servers)
    assert engine.policy_version == 3
    assert run_one(engine).policy_version == (3,) * 6


def test_case_c10_two_syncs_are_as_one_and_the_trainers_weights_stay_as_they_are(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    server.dtype = "bfloat16"
    engine = connect(server, takes_weights=True)
    mine = {"model.embed_tokens.weight": torch.randn(VOCAB_SIZE, 2)}
    before = {name: tensor.clone() for name, tensor in mine.items()}
    asyncio.run(engine.load_weights(mine, 1))
    first = server.weights["model.embed_tokens.weight"]
    report = asyncio.run(engine.load_weights(mine, 2))
    assert report.changed == 0
    assert report.sent_bytes == VOCAB_SIZE * 4  # as the server holds them
    assert torch.equal(first, mine["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(first, server.weights["model.embed_tokens.weight"])
    assert all(torch.equal(before[name], mine[name]) for name in mine)


def test_case_c09_a_sync_says_how_many_tensors_changed(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    engine = connect(stub(), takes_weights=True)
    changed = weights()
    changed["model.embed_tokens.weight"][3, 1] += 1e-6
    reports = [asyncio.run(engine.load_weights(given, 1)) for given in (weights(), weights(), changed)]
    assert [report.changed for report in reports] == [None, 0, 1]


def test_case_c08_every_cached_prefix_is_dropped_and_a_server_that_keeps_one_is_not_sampled_from(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, takes_weights=True)
    assert asyncio.run(engine.load_weights(weights(), 1)).caches_dropped == 2
    assert [server.caches_dropped for server in servers] == [1, 1]
    servers[1].keeps_caches = True
    with pytest.raises(EngineError, match=f"{servers[1].address}: its cached prefixes were not dropped"):
        asyncio.run(engine.load_weights(weights(), 2))
    assert {c.policy_version for c in asyncio.run(sample_all(engine, ["a/0", "b/0", "c/0"]))} == {(2,) * 6}
    assert not servers[1].asked


def test_a_request_in_flight_stands_still_and_goes_on(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    engine = connect(server, takes_weights=True)
    server.is_held = True

    async def load() -> tuple[Completion, int]:
        work = asyncio.create_task(engine.generate("t/0", [5], sampling()))
        await until(lambda: server.running == 1)
        report = await engine.load_weights(weights(), 1)
        assert not work.done()
        server.is_held = False
        return await work, report.requests_running

    completion, running = asyncio.run(load())
    assert (len(completion.token_ids), running) == (6, 1)
    assert engine.counts.resent == 0
    assert "/reset_prefix_cache?reset_running_requests=true" in server.posts
    assert "/pause?mode=keep&clear_cache=false" in server.posts


def test_a_server_that_died_is_not_taken_back_with_the_weights_of_its_folder(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], caplog: pytest.LogCaptureFixture
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, takes_weights=True)
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


def test_the_servers_that_live_get_weights_without_the_one_that_is_gone(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, takes_weights=True)
    servers[0].kill()
    assert asyncio.run(engine.load_weights(weights(), 3)).caches_dropped == 1
    assert engine.load.capacity == 64
    assert run_one(engine).policy_version == (3,) * 6
    servers[1].kill()
    with pytest.raises(EngineError, match="no connection"):
        asyncio.run(engine.load_weights(weights(), 4))


HURRIED = Patience(health_interval_s=0.05, request_timeout_s=30, backoff_s=0.02, recovery_s=1, sync_timeout_s=6.0)
"""For servers that hang: all others must be done by then, on a busy machine too."""
CALM = replace(HURRIED, sync_timeout_s=60.0)


@pytest.mark.parametrize("step", ["/update_weight_version", "/start_weight_update", "/update_weights", "/resume"])
@pytest.mark.parametrize("fault", [500, "drop", "hang", "die"])
def test_case_c12_a_server_that_fails_in_a_sync_is_an_error_in_time_and_nothing_is_sampled_from_it(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], fault: Any, step: str
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, takes_weights=True, patience=HURRIED if fault == "hang" else CALM)
    servers[1].sync_faults[step] = fault
    with pytest.raises(EngineError, match="1 of 2 servers did not take the weights: ") as caught:
        asyncio.run(engine.load_weights(weights(), 3))
    assert servers[1].address in str(caught.value)
    assert "\n" not in str(caught.value)
    if fault == 500:
        assert "the stub was told to answer 500" in str(caught.value)
    # The other one has them, and is the only one that is sampled from.
    assert {c.policy_version for c in asyncio.run(sample_all(engine, ["a/0", "b/0", "c/0"]))} == {(3,) * 6}
    assert not servers[1].asked
    servers[1].sync_faults.clear()
    if fault == "die":
        servers[1].start()
    asyncio.run(engine.load_weights(weights(), 4))
    assert engine.load.capacity == 128
    assert {c.policy_version for c in asyncio.run(sample_all(engine, ["a/0", "b/0", "c/0"]))} == {(4,) * 6}


@pytest.mark.parametrize("step", ["/pause", "/collective_rpc"])
@pytest.mark.parametrize("fault", [500, "drop", "hang"])
def test_case_c12_before_anything_is_sent_a_fault_leaves_all_servers_as_they_were(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], fault: Any, step: str
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, takes_weights=True, patience=HURRIED if fault == "hang" else CALM)
    asyncio.run(engine.load_weights(weights(), 3))
    servers[1].sync_faults[step] = fault
    with pytest.raises(EngineError, match=servers[1].address):
        asyncio.run(engine.load_weights(weights(), 4))
    assert engine.policy_version == 3
    assert [server.is_paused for server in servers] == [False, False]
    assert {c.policy_version for c in asyncio.run(sample_all(engine, ["a/0", "b/0", "c/0"]))} == {(3,) * 6}


def test_case_c12_one_that_stops_reading_in_the_middle_holds_nobody_up_for_ever(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    servers = [stub(), stub()]
    engine = connect(*servers, takes_weights=True, patience=HURRIED)
    servers[1].stops_after = 1
    began_s = time.monotonic()
    with pytest.raises(EngineError, match=f"server {servers[1].address}: .*no answer within"):
        asyncio.run(engine.load_weights(weights(), 3))
    assert time.monotonic() - began_s < 60  # it has 6 s; the machine may be busy
    assert run_one(engine).policy_version == (3,) * 6


def test_case_c12_where_no_server_took_them_nothing_is_sampled(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    engine = connect(server, takes_weights=True, patience=CALM)
    server.sync_faults["/update_weights"] = 500
    with pytest.raises(EngineError, match="1 of 1 servers did not take the weights"):
        asyncio.run(engine.load_weights(weights(), 3))
    assert engine.policy_version == 0
    assert server.is_paused  # half of its weights would end it
    with pytest.raises(EngineError, match=r"no server has whole weights .*told to answer 500"):
        run_one(engine)
    server.sync_faults.clear()
    asyncio.run(engine.load_weights(weights(), 3))
    assert run_one(engine).policy_version == (3,) * 6


def test_a_server_that_a_killed_run_left_paused_goes_on(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    server = stub()
    server.is_paused, server.version = True, "unfinished-7"
    engine = connect(server, takes_weights=True)
    with pytest.raises(EngineError, match="load_weights comes first"):
        run_one(engine)
    asyncio.run(engine.load_weights(weights(), 8))
    assert run_one(engine).policy_version == (8,) * 6


@pytest.mark.parametrize("changed", [{"takes": False}, {"dev_mode": False}])
def test_servers_that_take_no_weights_are_refused_with_how_to_start_them(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], changed: dict[str, bool]
) -> None:
    server = stub()
    for name, value in changed.items():
        setattr(server, name, value)
    with pytest.raises(ValueError, match=r"scripts\.serve MODEL --takes-weights") as caught:
        connect(server, takes_weights=True)
    assert server.address in str(caught.value)
    assert "\n" not in str(caught.value)
    engine = connect(server)
    with pytest.raises(EngineError, match=r"404|begin_policy_sync"):
        asyncio.run(engine.load_weights(weights(), 1))
    assert run_one(engine).policy_version == (0,) * 6


def adapter(scale: float = 1.0) -> AdapterWeights:
    name = "base_model.model.model.layers.0.mlp.up_proj"
    return AdapterWeights(
        tensors={
            f"{name}.lora_A.weight": torch.ones(2, 4) * scale,
            f"{name}.lora_B.weight": torch.ones(6, 2) * 2 * scale,
        },
        config={"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"], "bias": "none"},
    )


@pytest.fixture
def lora_model(tmp_path: Path) -> Path:
    folder = save_stub_model(tmp_path / "stub")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4)}, folder / "model.safetensors")
    return folder


def test_an_adapter_alone_is_sent_and_sampled_with(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], lora_model: Path
) -> None:
    servers = [stub(), stub()]
    for server in servers:
        server.lora_rank = 8
    engine = connect(*servers, model=lora_model, adapter_rank=2)
    for version, scale in ((1, 1.0), (2, 3.0), (3, 3.0)):
        report = asyncio.run(engine.load_adapter(adapter(scale), version))
        assert run_one(engine).policy_version == (version,) * 6
        for server in servers:
            assert all(torch.equal(server.weights[name], tensor) for name, tensor in adapter(scale).tensors.items())
            assert server.adapter_config["lora_alpha"] == 4
            assert all(body["model"] == "policy" for body in server.asked)
    assert (report.tensors, report.changed, report.caches_dropped, report.sent_bytes) == (2, 0, 2, 80)
    assert [server.posts.count("/v1/load_lora_adapter") for server in servers] == [1, 1]
    with pytest.raises(EngineError, match="would put it on top"):
        asyncio.run(engine.load_weights(weights(), 4))


def test_case_c12_a_server_that_fails_to_load_an_adapter_stays_out(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], lora_model: Path
) -> None:
    servers = [stub(), stub()]
    for server in servers:
        server.lora_rank = 8
    engine = connect(*servers, model=lora_model, adapter_rank=2, patience=CALM)
    servers[1].sync_faults["/v1/load_lora_adapter"] = 500
    with pytest.raises(EngineError, match=f"server {servers[1].address}: /v1/load_lora_adapter answered 500"):
        asyncio.run(engine.load_adapter(adapter(), 1))
    assert run_one(engine).policy_version == (1,) * 6
    assert not servers[1].asked


@pytest.mark.parametrize("rank", [0, 1])
def test_servers_without_room_for_the_adapter_are_refused(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], lora_model: Path, rank: int
) -> None:
    server = stub()
    server.lora_rank = rank
    with pytest.raises(ValueError, match=f"room for adapters up to rank {rank}, 2 is needed; .*--adapter-rank 2"):
        connect(server, model=lora_model, adapter_rank=2)


def test_case_c11_an_adapter_that_does_not_fit_is_refused_before_anything_is_sent(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], lora_model: Path
) -> None:
    server = stub()
    server.lora_rank = 8
    engine = connect(server, model=lora_model, adapter_rank=2)
    wrong = {name.replace("layers.0", "layers.7"): tensor for name, tensor in adapter().tensors.items()}
    for given in (wrong, {}):
        with pytest.raises(ValueError, match=r"no model\.layers\.7|no tensors"):
            asyncio.run(engine.load_adapter(AdapterWeights(tensors=given, config=adapter().config), 1))
    assert "/pause?mode=keep&clear_cache=false" not in server.posts
    assert run_one(engine).policy_version == (0,) * 6
