"""What is a request to a server, and what must its answer be?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollouts.engine import EngineError
from rollouts.engine_server import ServerEngine
from tests.rollouts.stub_fleet import run_one, sample_held, trajectories
from tests.rollouts.stub_server import StubServer, sample


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


def test_what_two_servers_refuse_is_not_sent_again(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine]
) -> None:
    """It would be refused everywhere and every time; what one refuses may be its own fault."""
    servers = [stub(), stub(), stub()]
    engine = connect(*servers)
    for server in servers:
        server.faults.append(400)
    with pytest.raises(EngineError, match="answered 400: the stub was told to"):
        run_one(engine)
    assert sum(len(server.asked) for server in servers) == 2
    assert engine.counts.resent == 1
