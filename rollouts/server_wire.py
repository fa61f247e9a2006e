"""What is said to a vLLM server, and how its answers are read: token ids both ways, in the two forms that it knows.

`TokensWire` speaks `/inference/v1/generate` (`--enable-scale-out`), which names the weight version of every token;
`CompletionsWire` speaks `/v1/completions`, which does not. Nothing here opens a connection, and an answer is taken
only when it is whole: every length, the stop token, the finish reason.

Worked example, prompt [7, 8], stop id 2, at most 4 tokens:

    asked     {"token_ids": [7, 8], "sampling_params": {"max_tokens": 4, "stop_token_ids": [2], "logprobs": 0, ...}}
    answered  {"token_ids": [5, 2], "finish_reason": "stop", "weight_versions": [{"version": "3", "start": 0, ...}]}
    read      token_ids (5, 2), versions ("3", "3")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol, cast

from data.types import FinishReason, SamplingParams
from rollouts.engine import EngineError

NO_LOGPROB = -9999.0
"""What vLLM writes where a logprob is minus infinity, not a number, or missing: no sampled token has one."""

Json = Mapping[str, Any]


class AbortedError(Exception):
    """The server gave the request up, as one that shuts down does. It is no answer: the request may be sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One completion as the server told it.

    token_ids, logprobs: `[n]`; nats.
    versions: `[n]`, the server's names of the weights; None where it does not say.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[str, ...] | None
    cached_prompt_tokens: int | None


class Wire(Protocol):
    """One of the forms. `model` is the name of an adapter; None = the server's own model."""

    path: str

    def ask(self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, model: str | None) -> Json:
        """The body of a request for one completion."""
        ...

    def read(self, answer: Json, prompt_ids: Sequence[int], params: SamplingParams) -> Reply:
        """The completion.

        Raises:
            AbortedError: the server gave the request up.
            EngineError: the answer is not whole, or not what was asked for.
        """
        ...

    def ask_score(self, token_ids: Sequence[int], *, model: str | None) -> Json:
        """The body of a request for the logprobs of `token_ids` `[n]`. The last one is asked for as a candidate of a
        sampled position, so that a full context fits too."""
        ...

    def read_score(self, answer: Json, token_ids: Sequence[int]) -> list[float]:
        """Logprobs `[n - 1]` (nats, temperature 1). Raises `EngineError` as `read` does."""
        ...

    def ask_top(self, prompt_ids: Sequence[int], *, temperature: float, model: str | None) -> Json:
        """The body of a request for the most likely next tokens."""
        ...

    def read_top(self, answer: Json) -> dict[int, float]:
        """Logprobs by token id, of the most likely ones and of the one that was sampled."""
        ...


class TokensWire:
    """`/inference/v1/generate`."""

    path = "/inference/v1/generate"

    def ask(self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, model: str | None) -> Json:
        return self._body(prompt_ids, model, _sampling(params, seed) | {"logprobs": 0})

    def read(self, answer: Json, prompt_ids: Sequence[int], params: SamplingParams) -> Reply:
        choice = _choice(answer)
        with _Reading(answer):
            content = choice["logprobs"]["content"]
            token_ids = tuple(choice["token_ids"])
            if [entry["token_id"] for entry in content] != list(token_ids):
                raise EngineError("its logprobs are of other tokens than those that it returned")
            return _whole(
                answer,
                Reply(
                    token_ids=token_ids,
                    logprobs=tuple(entry["logprob"] for entry in content),
                    finish_reason=cast("FinishReason", choice["finish_reason"]),
                    versions=_versions(choice.get("weight_versions"), len(token_ids)),
                    cached_prompt_tokens=_cached(answer),
                ),
                prompt_ids,
                params,
            )

    def ask_score(self, token_ids: Sequence[int], *, model: str | None) -> Json:
        # As many logprobs as candidates must be asked for, and the sampled token takes the first place: hence two.
        candidates = [token_ids[-1], 0 if token_ids[-1] else 1]
        asked = {"logprobs": 2, "logprob_token_ids": candidates, "prompt_logprobs": 0}
        return self._body(token_ids[:-1], model, _ONE_TOKEN | asked)

    def read_score(self, answer: Json, token_ids: Sequence[int]) -> list[float]:
        choice = _choice(answer)
        with _Reading(answer):
            entry = choice["logprobs"]["content"][0]
            last = {row["token_id"]: row["logprob"] for row in entry["top_logprobs"]}[token_ids[-1]]
            return _scores(answer["prompt_logprobs"], token_ids, last)

    def ask_top(self, prompt_ids: Sequence[int], *, temperature: float, model: str | None) -> Json:
        return self._body(prompt_ids, model, _ONE_TOKEN | {"temperature": temperature, "logprobs": _TOP})

    def read_top(self, answer: Json) -> dict[int, float]:
        choice = _choice(answer)
        with _Reading(answer):
            return {row["token_id"]: row["logprob"] for row in choice["logprobs"]["content"][0]["top_logprobs"]}

    def _body(self, prompt_ids: Sequence[int], model: str | None, sampling: Json) -> Json:
        named = {} if model is None else {"model": model}
        return {"token_ids": list(prompt_ids), "sampling_params": {**sampling, "detokenize": False}, **named}


class CompletionsWire:
    """`/v1/completions`. The server must have its tokenizer: it writes the text too, which nobody here reads."""

    path = "/v1/completions"

    def ask(self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, model: str | None) -> Json:
        return self._body(prompt_ids, model, _sampling(params, seed) | {"logprobs": 0})

    def read(self, answer: Json, prompt_ids: Sequence[int], params: SamplingParams) -> Reply:
        choice = _choice(answer)
        with _Reading(answer):
            token_ids, logprobs = tuple(choice["token_ids"]), choice["logprobs"]
            if [_token_id(name) for name in logprobs["tokens"]] != list(token_ids):
                raise EngineError("its logprobs are of other tokens than those that it returned")
            return _whole(
                answer,
                Reply(
                    token_ids=token_ids,
                    logprobs=tuple(logprobs["token_logprobs"]),
                    finish_reason=cast("FinishReason", choice["finish_reason"]),
                    versions=None,
                    cached_prompt_tokens=_cached(answer),
                ),
                prompt_ids,
                params,
            )

    def ask_score(self, token_ids: Sequence[int], *, model: str | None) -> Json:
        asked = {"logprobs": 1, "logprob_token_ids": [token_ids[-1]], "prompt_logprobs": 0}
        return self._body(token_ids[:-1], model, _ONE_TOKEN | asked)

    def read_score(self, answer: Json, token_ids: Sequence[int]) -> list[float]:
        choice = _choice(answer)
        with _Reading(answer):
            return _scores(choice["prompt_logprobs"], token_ids, self.read_top(answer)[token_ids[-1]])

    def ask_top(self, prompt_ids: Sequence[int], *, temperature: float, model: str | None) -> Json:
        return self._body(prompt_ids, model, _ONE_TOKEN | {"temperature": temperature, "logprobs": _TOP})

    def read_top(self, answer: Json) -> dict[int, float]:
        choice = _choice(answer)
        with _Reading(answer):
            return {_token_id(name): value for name, value in choice["logprobs"]["top_logprobs"][0].items()}

    def _body(self, prompt_ids: Sequence[int], model: str | None, sampling: Json) -> Json:
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        named = {} if model is None else {"model": model}
        return {"prompt": list(prompt_ids), **sampling, **ids, **named}


_TOP = 20
"""As many as vLLM gives unless it was told otherwise (`--max-logprobs`)."""

_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_ONE_TOKEN |= {"seed": 0, "ignore_eos": True}


def _sampling(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Every field is sent: for one that is missing the server takes the default of the model's folder."""
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "max_tokens": params.max_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "seed": seed,
        "ignore_eos": True,
    }
    if params.structural_tag is not None:
        sampling["structured_outputs"] = {"structural_tag": params.structural_tag}
    return sampling


class _Reading:
    """Turns what is missing or misshapen in an answer into one clear line."""

    def __init__(self, answer: Json) -> None:
        self._answer = answer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | IndexError | TypeError | ValueError | AttributeError):
            said = " ".join(str(self._answer).split())
            raise EngineError(f"it answered something else than vLLM 0.32 does ({error!r}): {said[:200]}") from error


def _choice(answer: Json) -> Any:
    with _Reading(answer):
        choice = answer["choices"][0]
        if choice["finish_reason"] == "abort":
            raise AbortedError("it gave the request up")
        return choice


def _whole(answer: Json, reply: Reply, prompt_ids: Sequence[int], params: SamplingParams) -> Reply:
    """The reply, checked.

    Raises:
        EngineError: it is not what was asked for, and would be wrong without anybody seeing it.
    """
    n, stops = len(reply.token_ids), params.stop_token_ids
    read = answer["usage"]["prompt_tokens"]
    if read != len(prompt_ids):
        raise EngineError(f"it sampled after {read} prompt tokens, {len(prompt_ids)} were sent")
    if any(type(token) is not int or token < 0 for token in reply.token_ids):
        raise EngineError(f"it returned token ids that are none: {list(reply.token_ids)[:20]}")
    if reply.finish_reason not in ("stop", "length"):
        raise EngineError(f"it ended a completion with {reply.finish_reason!r}; only stop and length are answers")
    if len(reply.logprobs) != n or (reply.versions is not None and len(reply.versions) != n):
        raise EngineError(f"it returned {n} tokens with {len(reply.logprobs)} logprobs, or with versions of others")
    wrong = [value for value in reply.logprobs if not isfinite(value) or value <= NO_LOGPROB or value > 1e-3]
    if wrong:
        raise EngineError(f"it returned {wrong[0]} as the logprob of a sampled token: weights or logits are broken")
    if reply.finish_reason == "stop" and (not n or reply.token_ids[-1] not in stops):
        raise EngineError(
            f"it stopped a completion at {reply.token_ids[-1:]}, which is none of the stop ids {list(stops)}: start it "
            "with --generation-config vllm, so that it takes no stop ids from the model's folder"
        )
    if any(token in stops for token in reply.token_ids[:-1]):
        raise EngineError(f"it sampled on after one of the stop ids {list(stops)}")
    if reply.finish_reason == "length" and n != params.max_tokens:
        raise EngineError(
            f"it cut a completion after {n} tokens, {params.max_tokens} were asked for: start it with "
            "--generation-config vllm and a --max-model-len that holds them"
        )
    return reply


def _versions(spans: Sequence[Json] | None, n: int) -> tuple[str, ...] | None:
    if spans is None:
        return None
    versions: list[str] = []
    for span in spans:
        if span["start"] != len(versions):
            raise EngineError(f"its weight versions leave tokens out: {list(spans)}")
        versions += [span["version"]] * (span["end"] - span["start"])
    return tuple(versions[: n + 1])


def _cached(answer: Json) -> int | None:
    """Told by servers with `--enable-prompt-tokens-details`."""
    details = answer["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def _scores(prompt_logprobs: Sequence[Any], token_ids: Sequence[int], last: float) -> list[float]:
    """The first row is None: nothing stands before the first token."""
    rows = zip(prompt_logprobs[1:], token_ids[1:-1], strict=True)
    return [*(row[str(token)]["logprob"] for row, token in rows), last]


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
