"""The law of the mask: trained tokens and tokens excluded for a reason are exactly the tokens that the policy sampled.

It is stated over random groups: any mix of stop reasons, rewards, turns and streams.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from data.collator import pack, unpack
from data.gate import check_batch
from data.ledger import Ledger
from data.types import Completion, Excluded, Segment, Source, TokenStream, TrainingSample
from envs.types import Task
from rollouts.samples import group_samples
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from tests.data.test_types import no_clock
from train.advantages import step_advantages
from train.config import GrpoConfig, ScaleRewards

lengths = st.integers(1, 4)
# What follows a completion: nothing (the end), a header, or an observation between two headers.
replies = st.sampled_from([(), (Source.TEMPLATE,), (Source.TEMPLATE, Source.TOOL, Source.TEMPLATE)])
rewards = st.sampled_from([0.0, 0.5, 1.0, None])
few = settings(no_clock, max_examples=60)


@dataclass(frozen=True)
class Case:
    """A group, what the ledger holds of it, and how it is turned into samples."""

    group: TrajectoryGroup
    ledger: Ledger
    mask_truncated: bool
    scale_rewards: ScaleRewards

    @property
    def advantages(self) -> dict[str, tuple[float, ...]]:
        return step_advantages(self.group.trajectories, GrpoConfig(scale_rewards=self.scale_rewards))

    def samples(self) -> list[TrainingSample]:
        return group_samples(self.group, self.advantages, mask_truncated=self.mask_truncated)


def make_completion(completion_id: str, token_ids: tuple[int, ...]) -> Completion:
    n = len(token_ids)
    return Completion(
        completion_id=completion_id,
        token_ids=token_ids,
        logprobs=tuple(-token / 7 for token in token_ids),
        finish_reason="stop",
        policy="p",
        # The weights changed in the middle of the completion.
        policy_version=(0,) * (n // 2) + (1,) * (n - n // 2),
    )


@st.composite
def trajectories(draw: st.DrawFn, sibling_index: int, ledger: Ledger) -> Trajectory:
    """No two tokens of a trajectory are the same, so one that is moved or repeated is seen."""
    stop_reason = draw(st.sampled_from(StopReason))
    trajectory_id = f"g/{sibling_index}"
    ids = itertools.count(100 * sibling_index)
    streams: list[TokenStream] = []
    turn = 0
    for _ in range(draw(st.integers(1, 2))):
        stream = TokenStream([Segment(source=Source.PROMPT, token_ids=(next(ids), next(ids)))])
        for reply in draw(st.lists(replies, max_size=3)):
            completion = make_completion(f"{trajectory_id}/{turn}", tuple(itertools.islice(ids, draw(lengths))))
            ledger.record(completion)
            stream.append(Segment.sampled(completion))
            for source in reply:
                stream.append(Segment(source=source, token_ids=(next(ids), next(ids))))
            turn += 1
        streams.append(stream)
    return Trajectory(
        trajectory_id=trajectory_id,
        task_id="task",
        group_id="g",
        sibling_index=sibling_index,
        streams=tuple(streams),
        turns=(),
        stop_reason=stop_reason,
        reward=None if stop_reason.is_infrastructure else draw(rewards),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ledger = Ledger()
    members = tuple(draw(trajectories(index, ledger)) for index in range(draw(st.integers(1, 4))))
    return Case(
        group=TrajectoryGroup(group_id="g", task=Task(task_id="task", prompt="?"), trajectories=members),
        ledger=ledger,
        mask_truncated=draw(st.booleans()),
        scale_rewards=draw(st.sampled_from(["group", "none"])),
    )


def expected_reason(case: Case, trajectory: Trajectory) -> Excluded | None:
    """The rule in words: no reward, then no gradient in the group, then cut by a limit of ours. Nothing was sampled for
    some, whose rewards are in the mean all the same."""
    known = [t.reward for t in case.group.trajectories if t.reward is not None]
    sampled = [t.reward for t in case.group.trajectories if t.reward is not None and t.completion_ids]
    if trajectory.reward is None:
        return Excluded.INFRASTRUCTURE
    if all(math.isclose(reward, sum(known) / len(known)) for reward in sampled):
        return Excluded.DEAD_GROUP
    if case.mask_truncated and trajectory.stop_reason.is_truncated:
        return Excluded.TRUNCATED
    return None


@few
@given(case=cases())
def test_only_sampled_tokens_are_trained(case: Case) -> None:
    for sample in case.samples():
        for source, trained, reason in zip(sample.source, sample.loss_mask, sample.excluded, strict=True):
            if source is Source.MODEL:
                assert trained == (reason is None)
            else:
                assert not trained
                assert reason is None


@few
@given(case=cases())
def test_trained_and_excluded_by_reason_are_exactly_what_was_sampled(case: Case) -> None:
    fate: dict[tuple[str, int], Excluded | None] = {}
    for sample in case.samples():
        for index, source in enumerate(sample.source):
            if source is not Source.MODEL:
                continue
            place = (sample.completion_ids[sample.completion_index[index]], sample.completion_position[index])
            assert place not in fate, "a sampled token is in the batch twice"
            fate[place] = sample.excluded[index]
    assert fate.keys() == {(c.completion_id, i) for c in case.ledger for i in range(len(c.token_ids))}
    reasons = {t.trajectory_id: expected_reason(case, t) for t in case.group.trajectories}
    for (completion_id, _), reason in fate.items():
        assert reason == reasons[completion_id.rpartition("/")[0]]


@few
@given(case=cases())
def test_samples_hold_the_streams_token_for_token(case: Case) -> None:
    streams = [(t, stream) for t in case.group.trajectories for stream in t.streams]
    for (trajectory, stream), sample in zip(streams, case.samples(), strict=True):
        assert list(sample.token_ids) == stream.token_ids
        assert [s for segment in stream for s in [segment.source] * len(segment.token_ids)] == list(sample.source)
        for index, trained in enumerate(sample.loss_mask):
            # One outcome, no discount: each turn has the same.
            assert sample.advantages[index] == (case.advantages[trajectory.trajectory_id][0] if trained else 0.0)
            if sample.source[index] is Source.MODEL:
                completion = case.ledger.get(sample.completion_ids[sample.completion_index[index]])
                assert completion is not None
                position = sample.completion_position[index]
                assert sample.token_ids[index] == completion.token_ids[position]
                assert sample.sampled_logprobs[index] == completion.logprobs[position]
                assert sample.policy_version[index] == completion.policy_version[position]
            else:
                assert sample.completion_index[index] == sample.completion_position[index] == -1


@few
@given(case=cases(), max_tokens=st.integers(40, 400))
def test_packing_is_lossless_for_the_gate(case: Case, max_tokens: int) -> None:
    samples = case.samples()
    batches = pack(samples, [1.0] * len(samples), max_tokens=max_tokens)
    unpacked = [sample for batch in batches for sample in unpack(batch)]
    assert Counter(s.token_ids for s in unpacked) == Counter(s.token_ids for s in samples)
    report = check_batch(unpacked, case.ledger)
    assert report == check_batch(samples, case.ledger)
    assert report.trained == sum(sum(sample.loss_mask) for sample in samples)
    assert report.trained + report.excluded.total() == sum(len(c.token_ids) for c in case.ledger)
