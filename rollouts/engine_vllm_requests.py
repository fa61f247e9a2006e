"""What is asked of vLLM, and how is its answer read? Between our words and vLLM's, nothing more."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VllmParams


@dataclass(frozen=True, slots=True)
class Pending:
    """A request inside vLLM: who waits for it, and how its output is read."""

    future: Future[Any]
    read: Callable[[RequestOutput], Any]


def sampling(params: SamplingParams) -> VllmParams:
    """One completion, with the logprob of each sampled token.

    Raises:
        ValueError: vLLM takes no such number, a temperature above 2 for one.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    # vLLM reads -1 as "no seed". Without one, vLLM would draw from the trainer's global generator.
    seed = secrets.randbits(48) if params.seed is None else params.seed % (1 << 63)
    tag = params.structural_tag
    try:
        return VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            structured_outputs=None if tag is None else StructuredOutputsParams(structural_tag=tag),
            max_tokens=params.max_tokens,
            stop_token_ids=list(params.stop_token_ids),
            seed=seed,
            ignore_eos=True,
            logprobs=0,  # of the sampled token and no other
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # used once; vLLM's deep copy took 50 µs of each request
        )
    except VLLMClientError as error:
        raise refusal(error) from error


def refusal(error: Exception) -> Exception:
    """What to raise when vLLM refuses a request: `ValueError` where the request is to blame, which vLLM's own errors
    are not, else `EngineError`."""
    from vllm.exceptions import VLLMClientError

    kind = ValueError if isinstance(error, VLLMClientError | ValueError) else EngineError
    return kind(f"vLLM refused a request: {' '.join(str(error).split())}")


def scoring(last_token: int) -> VllmParams:
    """The logprobs of a prompt's tokens, and of `last_token` behind it."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=1.0,
        max_tokens=1,
        seed=0,
        ignore_eos=True,
        prompt_logprobs=0,
        logprob_token_ids=[last_token],
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_completion(output: RequestOutput, *, completion_id: str, policy: str) -> Completion:
    """Raises `EngineError` when vLLM ended the request for another reason than a stop token or its length."""
    sampled = output.outputs[0]
    if sampled.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended completion {completion_id} with {sampled.finish_reason!r}")
    versions: list[int] = []
    for span in sampled.weight_versions or ():
        versions += [int(span.version)] * (span.end - span.start)
    return Completion(
        completion_id=completion_id,
        token_ids=tuple(sampled.token_ids),
        logprobs=tuple(_first_logprobs(sampled.logprobs)),
        finish_reason=sampled.finish_reason,
        policy=policy,
        policy_version=tuple(versions),
        cached_prompt_tokens=output.num_cached_tokens,
    )


def read_scores(output: RequestOutput) -> list[float]:
    """Logprobs `[n - 1]` (nats) of the tokens behind the first, the one asked for included."""
    last: Any = output.outputs[0].logprobs  # of the sampled token, then of the one asked for
    return [*_first_logprobs(output.prompt_logprobs), last.logprobs[-1]]


def _first_logprobs(logprobs: Any) -> list[float]:
    """Of each position the first logprob, which is the sampled (or prompt) token's; a position without one is
    skipped (the first token of a prompt)."""
    spans = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [logprobs.logprobs[start] for start, end in spans if end > start]
