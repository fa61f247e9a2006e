"""Does the engine really sample from the weights that the trainer holds? Asked after every sync.

An engine can take new weights without a complaint and keep parts of the old ones: a packed copy of a tied head,
cached prefixes, a name that was skipped. Nothing downstream would notice; the importance ratios would only drift.
So a few fixed prompts are scored on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isfinite

from rollouts.engine import Engine, EngineError, SyncReport

_MOVED = 1e-3
"""A trainer whose logprobs moved by so much (nats) must have moved the engine's too, be it by the last bit."""


class WeightSyncError(EngineError):
    """Engine and trainer do not have the same weights. The message names the probe and likely causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck:
    """What both sides said.

    policy_version, engine_logprobs, trainer_logprobs: of the last sync that moved the engine; the logprobs for each
        probe, `[n - 1]` (nats). Small moves that the engine does not follow therefore add up, and are found.
    largest_difference: between the two sides after this sync, over all tokens (nats).
    largest_change: of the engine in this sync (nats); None at the first.
    """

    policy_version: int
    engine_logprobs: tuple[tuple[float, ...], ...]
    trainer_logprobs: tuple[tuple[float, ...], ...]
    largest_difference: float
    largest_change: float | None


def check_pushed(report: SyncReport, *, is_updated: bool) -> None:
    """See that a sync after an update brought something new: names and shapes may be right and the tensors those that
    are frozen (verl #7495), and then the engine stays where it was for ever.

    is_updated: whether the trainer's weights were changed since the sync before.

    Raises:
        WeightSyncError: nothing was sent, or nothing of it had changed.
    """
    if report.tensors == 0 or (is_updated and report.changed == 0):
        raise WeightSyncError(
            f"none of the {report.tensors} tensors that were synced has changed, and the trainer made an update: the "
            "wrong ones were exported (the frozen weights beside an adapter?), or the optimizer has none that it trains"
        )


async def check_weights(
    engine: Engine,
    model_score: Callable[[Sequence[int]], Sequence[float]],
    probes: Sequence[Sequence[int]],
    tolerance: float,
    previous: WeightCheck | None = None,
) -> WeightCheck:
    """Score `probes` on both sides and compare.

    model_score: the trainer's side of `Engine.score`, token ids `[n]` to logprobs `[n - 1]` (nats, temperature 1).
    probes: the same token ids at every sync, some tens of tokens each.
    tolerance: largest difference of one logprob (nats): about 1e-3 when both sides are float32; 0.1 with bfloat16.
    previous: the check after the sync before, over the same probes.

    Raises:
        WeightSyncError: a logprob differs by more, or the trainer changed since `previous` and the engine did not.
        ValueError: there are no probes, or they are not those of `previous`.

    Worked example, tolerance 0.01, one probe of four tokens:

        engine   [-1.20, -0.70, -3.10]
        trainer  [-1.20, -0.70, -2.00]    raises: probe 0, token 3 differs by 1.1
    """
    if not probes:
        raise ValueError("check_weights needs at least one probe")
    trainer = tuple(tuple(model_score(probe)) for probe in probes)
    scores = await asyncio.gather(*(engine.score(probe) for probe in probes))
    ours = tuple(tuple(score) for score in scores)
    _compare_sides(ours, trainer, tolerance, engine.policy_version)
    change = None if previous is None else _compare_times(ours, trainer, previous)
    difference = _largest(ours, trainer)
    if previous is not None and change == 0:
        return replace(previous, largest_difference=difference, largest_change=change)
    return WeightCheck(
        policy_version=engine.policy_version,
        engine_logprobs=ours,
        trainer_logprobs=trainer,
        largest_difference=difference,
        largest_change=change,
    )


def _compare_sides(
    engine: tuple[tuple[float, ...], ...], trainer: tuple[tuple[float, ...], ...], tolerance: float, version: int
) -> None:
    worst, probe, token = 0.0, 0, 0
    for index, (left, right) in enumerate(zip(engine, trainer, strict=True)):
        for position, (a, b) in enumerate(zip(left, right, strict=True), start=1):
            difference = abs(a - b) if isfinite(a) and isfinite(b) else inf
            if difference > worst:
                worst, probe, token = difference, index, position
    if worst > tolerance:
        raise WeightSyncError(
            f"engine and trainer differ by {worst:.3g} nats (tolerance {tolerance:g}) at token {token} of probe "
            f"{probe} after the sync to version {version}. Likely causes: a tied head that kept its old packed copy "
            "(send lm_head.weight, or repack it), cached prefixes that were not dropped, a tensor that was not sent, "
            "or different precision on the two sides"
        )


def _compare_times(
    engine: tuple[tuple[float, ...], ...],
    trainer: tuple[tuple[float, ...], ...],
    previous: WeightCheck,
) -> float:
    if [len(row) for row in engine] != [len(row) for row in previous.engine_logprobs]:
        raise ValueError("check_weights compares with a previous check over the same probes")
    change = _largest(engine, previous.engine_logprobs)
    expected = _largest(trainer, previous.trainer_logprobs)
    if expected > _MOVED and change == 0:
        raise WeightSyncError(
            f"the trainer's logprobs changed by {expected:.3g} nats since version {previous.policy_version}, the "
            "engine's by nothing: the new weights did not arrive"
        )
    return change


def _largest(left: tuple[tuple[float, ...], ...], right: tuple[tuple[float, ...], ...]) -> float:
    pairs = zip(chain.from_iterable(left), chain.from_iterable(right), strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)
