"""Whose weights sampled a token, and how do new ones reach every server?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.engine import EngineError
from rollouts.engine_server import ServerEngine
from rollouts.server_patience import Patience
from tests.rollouts.stub_fleet import run_one, sample_all, sampling, until
from tests.rollouts.stub_server import VOCAB_SIZE, StubServer


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
