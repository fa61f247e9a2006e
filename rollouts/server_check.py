"""Is this server one to sample from? Asked of every server before it gets its first request, and when it comes back.

A server that answers may still be wrong in ways that nobody sees later: raw logprobs (vLLM's default), another model,
another adapter, weights of another step. All of it is tried out on a fixed probe, not read from a version number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path, PurePosixPath
from typing import Any

import httpx

from rollouts.engine import Engine, EngineError
from rollouts.server_command import RETURN_IDS, RETURN_LOGPROBS
from rollouts.server_folder import check_folder, vocab_size
from rollouts.server_http import KeyRefusedError, call
from rollouts.server_wire import CompletionsWire, TokensWire, Wire

PROBE_TOKENS = 16
_SAME_WEIGHTS = 0.1
"""Mean difference of the probe's logprobs (nats) up to which two servers have the same weights; bfloat16 on two kinds
of GPU stays below, another model does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a server must be.

    model: its folder here; a server may call it by the last part of the path.
    adapter: the name under which the adapter is served; None = the model itself.
    """

    model: Path
    vocab_size: int
    max_context_tokens: int
    adapter: str | None

    @property
    def name(self) -> str:
        return self.model.resolve().name


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a server turned out to be.

    version: its name of its weights, such as "7", or "default" where none were loaded since it started; None where
        it does not say.
    scores: `[PROBE_TOKENS - 1]`, logprobs (nats) of the probe: equal weights give equal ones.
    """

    wire: Wire
    version: str | None
    scores: tuple[float, ...]


async def check_server(client: httpx.AsyncClient, address: str, wanted: Wanted) -> Checked:
    """Find out how to talk to the server, and that it samples what is wanted.

    Raises:
        ServerFault: it does not answer, or not now.
        ValueError: it was started for something else; the message says how to start it.
    """
    await _check_model(client, address, wanted)
    probe = probe_ids(wanted.vocab_size)
    wire, ordinary = await _find_wire(client, address, probe, wanted)
    try:
        hot = await call(client, address, wire.path, wire.ask_top(probe, temperature=2.0, model=wanted.adapter))
        check_processed(wire.read_top(ordinary), wire.read_top(hot), wanted.vocab_size)
        await _check_vocabulary(client, address, wire, wanted)
        scored = await call(client, address, wire.path, wire.ask_score(probe, model=wanted.adapter))
        scores = tuple(wire.read_score(scored, probe))
    except EngineError as error:
        raise ValueError(f"server {address}: {error}") from error
    return Checked(wire=wire, version=await _version(client, address, wire, ordinary), scores=scores)


async def check_weights_changed(
    client: httpx.AsyncClient, address: str, wanted: Wanted, checked: Checked, *, timeout_s: float
) -> Checked:
    """What is known of a server once its weights have changed: their name, and how they score the probe.

    Raises:
        ServerFault, EngineError: it does not answer, or not with logprobs.
    """
    probe, wire = probe_ids(wanted.vocab_size), checked.wire
    body = wire.ask_score(probe, model=wanted.adapter)
    scored = await call(client, address, wire.path, body, timeout_s=timeout_s)
    scores = tuple(wire.read_score(scored, probe))
    return replace(checked, version=await _version(client, address, wire, scored), scores=scores)


def probe_ids(vocab_size: int) -> list[int]:
    """Ids from all over the vocabulary, the last one at the end."""
    return [(vocab_size - 1 - 7919 * index) % vocab_size for index in reversed(range(PROBE_TOKENS))]


async def score_probe(engine: Engine, model: Path) -> list[float]:
    """As `Checked.scores`, by any engine of servers."""
    return await engine.score(probe_ids(vocab_size(model)))


def check_processed(ordinary: Mapping[int, float], hot: Mapping[int, float], vocab_size: int) -> None:
    """Whether logprobs are of the distribution sampled from, by the most likely next tokens at temperatures 1 and 2.

    With temperature applied, differences between two tokens' logprobs are half as large at temperature 2; raw ones stay
    as they are. And they must be probabilities: logits pass the first test and not this one.

    Raises:
        EngineError: they are raw, or logits, or cannot be told apart.

    Worked example, two tokens: -0.1 and -2.1 at temperature 1 become -0.3 and -1.3 at temperature 2; were they -0.1 and
    -2.1 still, they would be raw.
    """
    common = sorted(ordinary.keys() & hot.keys(), key=lambda token: ordinary[token])
    gap = ordinary[common[-1]] - ordinary[common[0]] if common else 0.0
    if gap < 1e-3:
        raise EngineError("its next tokens are all equally likely: is the model loaded? Its logprobs tell nothing")
    ratio = (hot[common[-1]] - hot[common[0]]) / gap
    if abs(ratio - 0.5) > 0.25:
        raise EngineError(
            f"its logprobs are raw, not of what is sampled: at temperature 2 they differ {ratio:.2f} times as much as "
            f"at 1, and not half as much; start it with {RETURN_LOGPROBS}"
        )
    for logprobs in (ordinary, hot):
        total = sum(exp(min(value, 1.0)) for value in logprobs.values())
        if total > 1.01 or max(logprobs.values()) < -log(vocab_size) - 0.01:
            raise EngineError(f"its logprobs are no log-probabilities (logits?); start it with {RETURN_LOGPROBS}")


def differing(scores: Sequence[float], others: Sequence[float]) -> float | None:
    """The mean difference (nats) of two servers' scores of the probe, where it says that their weights differ."""
    mean = sum(abs(a - b) for a, b in zip(scores, others, strict=True)) / len(scores)
    return mean if mean > _SAME_WEIGHTS else None


async def _check_model(client: httpx.AsyncClient, address: str, wanted: Wanted) -> None:
    try:
        cards = (await call(client, address, "/v1/models"))["data"]
        served = [card for card in cards if card.get("parent") is None]
        adapters = [card["id"] for card in cards if card.get("parent") is not None]
        names = {PurePosixPath(name).name for card in served for name in (card["id"], card.get("root") or card["id"])}
        context = min(card["max_model_len"] for card in served)
    except KeyRefusedError as error:
        raise ValueError(f"server {address}: {error}") from error
    except (EngineError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"server {address}: this is no vLLM server ({error}); start one with vllm serve") from error
    if wanted.name not in names:
        raise ValueError(
            f"server {address}: it serves {', '.join(sorted(names))} and not {wanted.name}; start it with that model, "
            f"or, where only the name differs, with --served-model-name {wanted.name}"
        )
    for card in served:
        try:
            await asyncio.to_thread(check_folder, card.get("root") or card["id"], wanted.model)
        except ValueError as error:
            raise ValueError(f"server {address}: {error}") from error
    if context < wanted.max_context_tokens:
        raise ValueError(
            f"server {address}: its context holds {context} tokens, engine.max_context_tokens is "
            f"{wanted.max_context_tokens}; start it with --max-model-len {wanted.max_context_tokens}, or lower that"
        )
    if wanted.adapter is not None and wanted.adapter not in adapters:
        raise ValueError(
            f"server {address}: it has no adapter {wanted.adapter!r} (it has: {', '.join(adapters) or 'none'}); start "
            f"it with --enable-lora --lora-modules {wanted.adapter}=FOLDER"
        )


async def _find_wire(
    client: httpx.AsyncClient, address: str, probe: Sequence[int], wanted: Wanted
) -> tuple[Wire, Mapping[str, Any]]:
    """The first wire on which the server gives ids and logprobs, and its answer to the probe."""
    refusals: list[str] = []
    for wire in (TokensWire(), CompletionsWire()):
        try:
            body = wire.ask_top(probe, temperature=1.0, model=wanted.adapter)
            answer = await call(client, address, wire.path, body)
            wire.read_top(answer)
            if answer["choices"][0].get("token_ids"):
                return wire, answer
            refusals.append(f"{wire.path}: no token ids in its answer")
        except EngineError as error:
            refusals.append(f"{wire.path}: {error}")
    raise ValueError(
        f"server {address}: it gives no token ids with logprobs ({'; '.join(refusals)}); start it with {RETURN_IDS} "
        f"{RETURN_LOGPROBS}, and a model whose vocabulary has {wanted.vocab_size} ids"
    )


async def _check_vocabulary(client: httpx.AsyncClient, address: str, wire: Wire, wanted: Wanted) -> None:
    """A logprob of the last id will be asked for; one of the id after it must be refused. (In a prompt it may pass: a
    server without a tokenizer takes any id there.)"""
    beyond = wire.ask_score([0, wanted.vocab_size], model=wanted.adapter)
    try:
        await call(client, address, wire.path, beyond)
    except EngineError:
        return
    raise EngineError(
        f"its vocabulary is larger than that of {wanted.name}, which has {wanted.vocab_size} ids: it has another "
        "model; start it with the one that the configuration names"
    )


async def _version(client: httpx.AsyncClient, address: str, wire: Wire, answer: Mapping[str, Any]) -> str | None:
    spans = answer["choices"][0].get("weight_versions")
    if spans:
        return spans[-1]["version"]
    try:
        return (await call(client, address, "/weight_info"))["weight_version"]
    except (EngineError, KeyError):
        return None  # only its development mode has that address
