"""The gate stops a batch that is not what the policy sampled, and names the trajectory and the token. Case A07."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.collator import MicroBatch, columns_of, pack, unpack
from data.gate import GateError, check_batch
from data.ledger import Ledger
from data.types import Completion, Excluded, Segment, Source, TokenStream, TrainingSample
from envs.types import Task
from rollouts.samples import group_samples
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from tests.by_turn import by_turn

# A sample of the good batch, column by column:
#   0 1     2 3 4                 5         6 7   8         9 10
#   prompt  completion a/…/0      template  tool  template  completion a/…/1
FIRST, LAST, TEMPLATE, TOOL, SECOND_TURN = 2, 4, 5, 6, 9


def make_trajectory(index: int, reward: float | None, stop_reason: StopReason, ledger: Ledger) -> Trajectory:
    name = f"a/{index}"
    first = Completion(
        completion_id=f"{name}/0",
        token_ids=(11 + index, 12, 3),
        logprobs=(-0.5, -1.25, -0.01),
        finish_reason="stop",
        policy="p",
        policy_version=(4, 4, 5),
    )
    second = Completion(
        completion_id=f"{name}/1",
        token_ids=(21 + index, 3),
        logprobs=(-2.5, -0.125),
        finish_reason="stop",
        policy="p",
        policy_version=(5, 5),
    )
    stream = TokenStream()
    stream.append(Segment(source=Source.PROMPT, token_ids=(1, 2)))
    stream.append(Segment.sampled(first))
    stream.append(Segment(source=Source.TEMPLATE, token_ids=(7,)))
    stream.append(Segment(source=Source.TOOL, token_ids=(8, 9)))
    stream.append(Segment(source=Source.TEMPLATE, token_ids=(7,)))
    stream.append(Segment.sampled(second))
    for completion in (first, second):
        ledger.record(completion)
    return Trajectory(
        trajectory_id=name,
        task_id="t",
        group_id="a",
        sibling_index=index,
        streams=(stream,),
        turns=(),
        stop_reason=stop_reason,
        reward=reward,
    )


def good_batch() -> tuple[list[TrainingSample], Ledger]:
    """Two trained samples, and two that are excluded: truncated, and lost by our machinery."""
    ledger = Ledger()
    trajectories = (
        make_trajectory(0, 1.0, StopReason.FINAL_ANSWER, ledger),
        make_trajectory(1, 0.0, StopReason.FINAL_ANSWER, ledger),
        make_trajectory(2, 0.0, StopReason.MAX_TURNS, ledger),
        make_trajectory(3, None, StopReason.SANDBOX_ERROR, ledger),
    )
    group = TrajectoryGroup(group_id="a", task=Task(task_id="t", prompt="?"), trajectories=trajectories)
    return group_samples(group, by_turn(group, [1.0, -0.5, -0.5, None]), mask_truncated=True), ledger


def with_token(sample: TrainingSample, name: str, index: int, value: Any) -> TrainingSample:
    values = list(getattr(sample, name))
    values[index] = value
    return replace(sample, **{name: tuple(values)})


def test_what_the_code_produces_passes() -> None:
    samples, ledger = good_batch()
    report = check_batch(samples, ledger)
    assert report.trained == 10
    assert report.excluded == {Excluded.TRUNCATED: 5, Excluded.INFRASTRUCTURE: 5}


def shift_mask(sample: TrainingSample) -> TrainingSample:
    return replace(sample, loss_mask=(False, *sample.loss_mask[:-1]))


Mutation = Callable[[TrainingSample], TrainingSample]

# (what is done to the first sample, the token that must be named, what must be said)
MUTATIONS: dict[str, tuple[Mutation, int, str]] = {
    "the mask shifted right by one": (shift_mask, FIRST, "either trained or excluded with a reason"),
    "the mask shifted left by one": (
        lambda s: replace(s, loss_mask=(*s.loss_mask[1:], False)), FIRST - 1, "a prompt token is trained",
    ),
    "a tool token trained": (lambda s: with_token(s, "loss_mask", TOOL, True), TOOL, "a tool token is trained"),
    "a template token trained": (
        lambda s: with_token(s, "loss_mask", TEMPLATE, True), TEMPLATE, "a template token is trained",
    ),
    "a logprob dropped": (lambda s: with_token(s, "sampled_logprobs", FIRST, 0.0), FIRST, "logprob 0.0 is not"),
    "a logprob nudged": (
        lambda s: with_token(s, "sampled_logprobs", LAST, -0.0101), LAST, "is not the sampled -0.01 nats",
    ),
    "a logprob that is no number": (
        lambda s: with_token(s, "sampled_logprobs", LAST, float("nan")), LAST, "logprob nan",
    ),
    "logprobs of the neighbours": (
        lambda s: replace(s, sampled_logprobs=(0.0, *s.sampled_logprobs[:-1])), FIRST, "logprob 0.0 is not",
    ),
    "a sampled id changed": (
        lambda s: with_token(s, "token_ids", FIRST, 99), FIRST, "token id 99 is not the sampled 11",
    ),
    "the second turn's id changed (A07)": (
        lambda s: with_token(s, "token_ids", SECOND_TURN, 99), SECOND_TURN, "token id 99 is not the sampled 21",
    ),
    "another policy version": (
        lambda s: with_token(s, "policy_version", LAST, 4), LAST, "policy version 4 is not that of the ledger",
    ),
    "another completion's name": (
        lambda s: replace(s, completion_ids=("a/1/0", "a/0/1")), FIRST, "a/1/0",
    ),
    "a completion that nobody sampled": (
        lambda s: replace(s, completion_ids=("a/9/0", "a/0/1")), FIRST, "completion a/9/0 is not in the ledger",
    ),
    "no completion": (
        lambda s: with_token(s, "completion_index", FIRST, -1), FIRST, "a MODEL token names no completion",
    ),
    "a position beyond the end": (
        lambda s: with_token(s, "completion_position", LAST, 3), LAST, "position 3 lies beyond completion a/0/0",
    ),
    "a position twice": (
        lambda s: with_token(s, "completion_position", LAST, 1), LAST, "token 1 of completion a/0/0 is in the batch",
    ),
    "an advantage that is no number": (
        lambda s: with_token(s, "advantages", FIRST, float("nan")), FIRST, "advantage nan is not a number",
    ),
    "an infinite advantage": (
        lambda s: with_token(s, "advantages", FIRST, float("inf")), FIRST, "advantage inf is not a number",
    ),
    "an advantage on an observation": (
        lambda s: with_token(s, "advantages", TOOL, 1.0), TOOL, "a tool token has the advantage 1.0",
    ),
    "excluded without a reason": (
        lambda s: with_token(s, "loss_mask", FIRST, False), FIRST, "either trained or excluded with a reason",
    ),
    "trained and excluded": (
        lambda s: with_token(s, "excluded", FIRST, Excluded.STALE), FIRST, "either trained or excluded with a reason",
    ),
    "a context token excluded": (
        lambda s: with_token(s, "excluded", TOOL, Excluded.TRUNCATED), TOOL, "claims to be part of a completion",
    ),
    "a demonstration in RL": (
        lambda s: with_token(s, "source", FIRST, Source.TARGET), FIRST, "a target token is trained",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_changed_sample_is_refused(name: str, place: str) -> None:
    mutate, token, rule = MUTATIONS[name]
    samples, ledger = good_batch()
    if place == "last":
        samples = samples[::-1]
    index = next(i for i, sample in enumerate(samples) if sample.trajectory_id == "a/0")
    samples[index] = mutate(samples[index])
    with pytest.raises(GateError, match=re.escape(f"gate: trajectory a/0, token {token}: ") + ".*" + re.escape(rule)):
        check_batch(samples, ledger)


def test_a_sample_twice_is_refused() -> None:
    samples, ledger = good_batch()
    with pytest.raises(GateError, match=r"trajectory a/0, token 2: token 0 of completion a/0/0 is in the batch twice"):
        check_batch([*samples, samples[0]], ledger)


@pytest.mark.parametrize("dropped", range(4))
def test_a_missing_sample_is_refused(dropped: int) -> None:
    samples, ledger = good_batch()
    del samples[dropped]
    rule = f"completion a/{dropped}/0: token 0 was sampled, but is neither trained nor excluded"
    with pytest.raises(GateError, match=rule):
        check_batch(samples, ledger)


def test_a_completion_cut_short_is_refused() -> None:
    samples, ledger = good_batch()
    names = [field for field in TrainingSample.__dataclass_fields__ if field not in ("trajectory_id", "completion_ids")]
    samples[0] = replace(samples[0], **{name: getattr(samples[0], name)[:-1] for name in names})
    with pytest.raises(GateError, match=r"completion a/0/1: token 1 was sampled, but is neither"):
        check_batch(samples, ledger)


def test_a_trained_first_token_is_refused() -> None:
    """Nothing predicts it, so its logprob would be that of another context."""
    ledger = Ledger()
    trajectory = make_trajectory(0, 1.0, StopReason.FINAL_ANSWER, ledger)
    headless = replace(trajectory, streams=(TokenStream(trajectory.streams[0].segments[1:]),))
    group = TrajectoryGroup(group_id="a", task=Task(task_id="t", prompt="?"), trajectories=(headless,))
    samples = group_samples(group, by_turn(group, [1.0]), mask_truncated=False)
    with pytest.raises(GateError, match=r"trajectory a/0, token 0: the first token of a row is trained"):
        check_batch(samples, ledger)


# (what is done to the packed tensors, given the first sample's columns `c`; token, rule)
TENSOR_MUTATIONS: dict[str, tuple[Callable[[MicroBatch, Tensor], object], int, str]] = {
    "the mask shifted right by one": (
        lambda b, c: b.loss_mask.copy_(b.loss_mask.roll(1)), FIRST, "either trained or excluded",
    ),
    "the ids shifted right by one": (
        lambda b, c: b.token_ids.copy_(b.token_ids.roll(1)), FIRST, "token id 2 is not",
    ),
    "a tool token trained": (
        lambda b, c: b.loss_mask.__setitem__(c[TOOL], True), TOOL, "a tool token is trained",
    ),
    "an advantage of nan": (
        lambda b, c: b.advantages.__setitem__(c[FIRST], torch.nan), FIRST, "advantage nan is not a number",
    ),
    "the logprobs zeroed": (lambda b, c: b.sampled_logprobs.zero_(), FIRST, "logprob 0.0 is not"),
    "a logprob in half precision": (
        lambda b, c: b.sampled_logprobs.copy_(b.sampled_logprobs.bfloat16()), LAST, "is not the sampled -0.01 nats",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_MUTATIONS)
def test_a_change_to_the_packed_tensors_is_refused(name: str) -> None:
    mutate, token, rule = TENSOR_MUTATIONS[name]
    samples, ledger = good_batch()
    (batch,) = pack(samples, [1.0] * len(samples), max_tokens=100)
    check_batch(unpack(batch), ledger)
    place = next(place for place in batch.placements if place.sample.trajectory_id == "a/0")
    mutate(batch, columns_of(batch, place))
    with pytest.raises(GateError, match=re.escape(f"trajectory a/0, token {token}: ") + ".*" + re.escape(rule)):
        check_batch(unpack(batch), ledger)


def forced_batch() -> tuple[list[TrainingSample], Ledger]:
    """One group of two; the middle token of the first completion is the only one that its grammar allowed."""
    ledger = Ledger()
    trajectories = []
    for index in range(2):
        completion = Completion(
            completion_id=f"a/{index}/0",
            token_ids=(5, 6, 3),
            logprobs=(-0.5, 0.0, -0.25),
            finish_reason="stop",
            policy="p",
            policy_version=(1, 1, 1),
            forced=(1,) if index == 0 else (),
        )
        ledger.record(completion)
        stream = TokenStream([Segment(source=Source.PROMPT, token_ids=(1,)), Segment.sampled(completion)])
        trajectories.append(
            Trajectory(
                trajectory_id=f"a/{index}", task_id="t", group_id="a", sibling_index=index, streams=(stream,), turns=(),
                stop_reason=StopReason.FINAL_ANSWER, reward=float(index),
            )
        )  # fmt: skip
    task = Task(task_id="t", prompt="")
    group = TrajectoryGroup(group_id="a", task=task, trajectories=tuple(trajectories))
    return group_samples(group, by_turn(group, (-1.0, 1.0)), mask_truncated=True), ledger


def test_a_forced_token_is_left_out_and_counted() -> None:
    samples, ledger = forced_batch()
    assert samples[0].loss_mask == (False, True, False, True)
    assert samples[0].advantages == (0.0, -1.0, 0.0, -1.0)
    assert samples[1].loss_mask == (False, True, True, True)
    report = check_batch(samples, ledger)
    assert (report.trained, report.excluded) == (5, {Excluded.FORCED: 1})


def test_a_forced_token_that_is_trained_is_refused() -> None:
    samples, ledger = forced_batch()
    trained = with_token(with_token(samples[0], "excluded", 2, None), "loss_mask", 2, True)
    with pytest.raises(GateError, match="trajectory a/0, token 2: a token that the grammar forced is trained"):
        check_batch([trained, samples[1]], ledger)


def test_a_free_token_that_is_left_out_as_forced_is_refused() -> None:
    samples, ledger = forced_batch()
    left_out = with_token(with_token(samples[1], "excluded", 2, Excluded.FORCED), "loss_mask", 2, False)
    with pytest.raises(GateError, match="trajectory a/1, token 2: a token is left out as forced"):
        check_batch([samples[0], left_out], ledger)


@pytest.mark.parametrize("forced", [(3,), (-1,), (0,)])
def test_a_token_with_another_choice_cannot_be_forced(forced: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be forced"):
        Completion(
            completion_id="c", token_ids=(5, 6, 3), logprobs=(-0.5, 0.0, -0.25), finish_reason="stop", policy="p",
            policy_version=(1, 1, 1), forced=forced,
        )  # fmt: skip
