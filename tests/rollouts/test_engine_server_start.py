"""What does an engine over servers refuse at the start, and does it say how to start them instead?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.types import Completion
from rollouts.config import EngineConfig
from rollouts.engine import EngineError
from rollouts.engine_server import ServerEngine
from rollouts.open_engine import open_engine
from tests.rollouts.stub_fleet import run_one, sampling
from tests.rollouts.stub_server import StubServer


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


@pytest.mark.parametrize("status", [200, 404])
def test_a_page_of_html_is_cut_to_its_first_words(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], status: int
) -> None:
    server = stub()
    words = "It works " + "and works " * 100
    server.page, server.page_status = f"<!DOCTYPE html>\n<style>b {{}}</style><h1 a='b'>{words}</h1>", status
    with pytest.raises(
        ValueError, match=r"this is no vLLM server \(/v1/models answered .*: It works and works"
    ) as caught:
        connect(server)
    message = str(caught.value)
    assert not set("<>{}\n") & set(message)
    assert len(message) < 300


@pytest.mark.parametrize("key", [None, "another"])
def test_a_server_with_an_api_key_says_where_to_put_it(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], key: str | None
) -> None:
    server = stub(api_key="secret")
    with pytest.raises(ValueError, match=r"answered 401: .*; set VLLM_API_KEY to the key") as caught:
        connect(server, api_key=key)
    assert "no vLLM server" not in str(caught.value)
    assert run_one(connect(server, api_key="secret")).token_ids


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kind": "server"}, "engine.kind is server and engine.servers names 0"),
        ({"kind": "vllm", "servers": ("http://h:1",)}, "engine.kind is vllm and engine.servers names 1"),
        (
            {"kind": "server", "servers": ("http://h:1",), "dtype": "float32"},
            "dtype does nothing where kind is server: leave it at auto; scripts.serve has it",
        ),
        ({"kind": "transformers", "gpu_memory_utilization": 0.5}, "gpu_memory_utilization does nothing where kind is"),
        ({"kind": "server", "servers": ("localhost:8000",)}, "is no address; write http://HOST:PORT"),
        ({"kind": "server", "servers": ("http://127.0.0.1:99999",)}, "is no address; write http://HOST:PORT"),
        ({"kind": "server", "servers": ("http://127.0.0.1:0",)}, "is no address; write http://HOST:PORT"),
        ({"kind": "server", "servers": ("http://127.0.0.1:x",)}, r"is no address \(.*\); write http://HOST:PORT"),
        ({"kind": "server", "servers": ("http://h:1", "http://h:1/")}, "name each server once"),
    ],
)
def test_a_configuration_that_names_no_servers_or_too_many(stub_model: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_engine(EngineConfig(**config), model=str(stub_model))


def test_open_engine_connects(stub: Callable[..., StubServer], stub_model: Path) -> None:
    server = stub()

    async def inside_a_loop() -> Completion:
        config = EngineConfig(kind="server", servers=(server.address + "/v1",), max_context_tokens=256)
        engine = open_engine(config, model=str(stub_model), policy_version=4)
        try:
            return await engine.generate("g/0/0", [5], sampling())
        finally:
            await engine.close()

    assert asyncio.run(inside_a_loop()).policy_version == (4,) * 6
    assert server.connections == 0
