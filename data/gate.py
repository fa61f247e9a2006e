"""The gate: what is about to be trained is exactly what the policy sampled, or nothing is trained.

It runs before a step's first update, on the final batches, and compares them with the ledger, not with what they were
made from. No torch: a dump can be checked anywhere.

The rules:
- every trained token is MODEL, and equals, by completion and position, what the ledger says was sampled, with the same
  logprob and policy version;
- no position is there twice, none lies beyond the end of its completion;
- trained plus excluded tokens are exactly the ledger's tokens; every excluded token says why;
- a token that a grammar forced is not trained, and no other is left out as one;
- the first token of a row is not trained: nothing predicts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from data.ledger import Ledger
from data.types import Completion, Excluded, Source, TrainingSample

# The batch holds float32; the ledger holds what the engine gave, in Python floats.
_FLOAT32_ROUNDING = 1e-6


class GateError(RuntimeError):
    """The batch breaks a rule. The message names the trajectory, the token and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Token counts of a batch that passed: trained, and excluded by reason."""

    trained: int
    excluded: Counter[Excluded]


def check_batch(samples: Iterable[TrainingSample], ledger: Ledger) -> GateReport:
    """Check a batch against the ledger's completions.

    Raises:
        GateError: at the first violation.
    """
    seen = {completion.completion_id: [False] * len(completion.token_ids) for completion in ledger}
    trained = 0
    excluded: Counter[Excluded] = Counter()
    for sample in samples:
        for index in range(len(sample)):
            reason = sample.excluded[index]
            if sample.source[index] is not Source.MODEL:
                _check_context(sample, index)
                continue
            _check_sampled(sample, index, ledger, seen)
            if sample.loss_mask[index]:
                trained += 1
            elif reason is not None:
                excluded[reason] += 1
    _check_complete(seen)
    return GateReport(trained=trained, excluded=excluded)


def _check_context(sample: TrainingSample, index: int) -> None:
    """A token that the policy did not sample is not trained, and has no reason for that."""
    if sample.loss_mask[index]:
        _fail(sample, index, f"a {sample.source[index].value} token is trained; only sampled tokens may be")
    if sample.advantages[index] != 0.0:
        _fail(sample, index, f"a {sample.source[index].value} token has the advantage {sample.advantages[index]}")
    if sample.excluded[index] is not None or sample.completion_index[index] != -1:
        _fail(sample, index, f"a {sample.source[index].value} token claims to be part of a completion")


def _check_sampled(sample: TrainingSample, index: int, ledger: Ledger, seen: Mapping[str, list[bool]]) -> None:
    completion, position = _completion_of(sample, index, ledger)
    if seen[completion.completion_id][position]:
        _fail(sample, index, f"token {position} of completion {completion.completion_id} is in the batch twice")
    seen[completion.completion_id][position] = True
    if sample.token_ids[index] != completion.token_ids[position]:
        _fail(
            sample,
            index,
            f"token id {sample.token_ids[index]} is not the sampled {completion.token_ids[position]} "
            f"(completion {completion.completion_id}, position {position})",
        )
    if sample.policy_version[index] != completion.policy_version[position]:
        _fail(sample, index, f"policy version {sample.policy_version[index]} is not that of the ledger")
    sampled, recorded = sample.sampled_logprobs[index], completion.logprobs[position]
    if not math.isfinite(sampled) or abs(sampled - recorded) > _FLOAT32_ROUNDING * max(1.0, abs(recorded)):
        _fail(sample, index, f"logprob {sampled} is not the sampled {recorded} nats")
    if sample.loss_mask[index] == (sample.excluded[index] is not None):
        _fail(sample, index, "a sampled token must be either trained or excluded with a reason")
    forced = position in completion.forced
    if forced and sample.loss_mask[index]:
        _fail(sample, index, "a token that the grammar forced is trained; the policy had no choice")
    if not forced and sample.excluded[index] is Excluded.FORCED:
        _fail(sample, index, "a token is left out as forced, and the ledger says that the policy had a choice")
    if sample.loss_mask[index] and index == 0:
        _fail(sample, index, "the first token of a row is trained, and nothing predicts it")
    if not math.isfinite(sample.advantages[index]):
        _fail(sample, index, f"advantage {sample.advantages[index]} is not a number to train with")


def _completion_of(sample: TrainingSample, index: int, ledger: Ledger) -> tuple[Completion, int]:
    number, position = sample.completion_index[index], sample.completion_position[index]
    if not 0 <= number < len(sample.completion_ids):
        _fail(sample, index, "a MODEL token names no completion")
    completion_id = sample.completion_ids[number]
    completion = ledger.get(completion_id)
    if completion is None:
        _fail(sample, index, f"completion {completion_id} is not in the ledger")
    if not 0 <= position < len(completion.token_ids):
        _fail(
            sample, index, f"position {position} lies beyond completion {completion_id} ({len(completion.token_ids)})"
        )
    return completion, position


def _check_complete(seen: Mapping[str, list[bool]]) -> None:
    for completion_id, positions in seen.items():
        if not all(positions):
            raise GateError(
                f"gate: completion {completion_id}: token {positions.index(False)} was sampled, but is neither "
                "trained nor excluded"
            )


def _fail(sample: TrainingSample, index: int, rule: str) -> NoReturn:
    raise GateError(f"gate: trajectory {sample.trajectory_id}, token {index}: {rule}")
