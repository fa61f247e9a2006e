"""The loss of a step: normalisers that count the trained tokens of trajectories only, and a gradient that no way of
packing, padding or splitting changes. (The loss of given tokens: `test_policy_loss`.)"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data.collator import MicroBatch, pack
from data.rows import SampleBuilder
from data.types import Excluded, Segment, Source, TokenStream, TrainingSample
from envs.types import Task
from rollouts.samples import group_samples
from rollouts.summary import summarise
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from tests.data.test_types import no_clock
from tests.random_samples import random_samples, tiny_model
from train.advantages import step_advantages
from train.config import GrpoConfig, LossType, OptimizerConfig
from train.learner import Learner
from train.loss import sample_weights
from train.model import score
from train.step_samples import samples_and_metrics

LOSS_TYPES: list[LossType] = ["grpo", "dapo", "dr_grpo", "cispo", "rloo"]
SUMMING_TO_ONE: list[LossType] = ["grpo", "dapo", "cispo", "rloo"]
TEMPERATURE = 0.7
MAX_TRAJECTORY_TOKENS = 40


pytestmark = pytest.mark.usefixtures("one_thread")


# The normalisers.


def make_sample(
    name: str, sampled: int, observed: int = 1, *, advantage: float = 1.0, excluded: Excluded | None = None
) -> TrainingSample:
    builder = SampleBuilder(name)
    builder.add_context(Segment(source=Source.PROMPT, token_ids=(9, 10)))
    ids = tuple(11 + index % 50 for index in range(sampled))
    segment = Segment(
        source=Source.MODEL,
        token_ids=ids,
        completion_id=f"{name}/0",
        logprobs=(-1.0,) * sampled,
        policy_version=(0,) * sampled,
    )
    builder.add_sampled(segment, advantage=advantage, excluded=excluded)
    builder.add_context(Segment(source=Source.TOOL, token_ids=(12,) * observed))
    return builder.build()


def test_weights_by_hand() -> None:
    samples = [make_sample("a", 2), make_sample("b", 3), make_sample("c", 4, excluded=Excluded.DEAD_GROUP)]
    for loss_type in ("dapo", "cispo"):
        assert sample_weights(samples, loss_type) == [1 / 5, 1 / 5, 0.0]
    for loss_type in ("grpo", "rloo"):
        assert sample_weights(samples, loss_type) == [1 / (2 * 2), 1 / (2 * 3), 0.0]
    assert sample_weights(samples, "dr_grpo", max_trajectory_tokens=10) == [1 / 20, 1 / 20, 0.0]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_trajectory_of_several_samples_counts_once(loss_type: LossType) -> None:
    """The first trajectory has two streams, of 2 and 4 trained tokens, and a third without one."""
    streams = [make_sample("a", 2), make_sample("b", 3), make_sample("a", 4)]
    streams.append(make_sample("a", 5, excluded=Excluded.STALE))
    weights = sample_weights(streams, loss_type, max_trajectory_tokens=10)
    expected = {
        "dapo": [1 / 9, 1 / 9, 1 / 9, 0.0],
        "cispo": [1 / 9, 1 / 9, 1 / 9, 0.0],
        "grpo": [1 / (2 * 6), 1 / (2 * 3), 1 / (2 * 6), 0.0],
        "rloo": [1 / (2 * 6), 1 / (2 * 3), 1 / (2 * 6), 0.0],
        "dr_grpo": [1 / 20, 1 / 20, 1 / 20, 0.0],
    }
    assert weights == expected[loss_type]


def test_dr_grpo_needs_its_constant() -> None:
    with pytest.raises(ValueError, match=r"^loss_type 'dr_grpo' divides by max_trajectory_tokens"):
        sample_weights([make_sample("a", 2)], "dr_grpo")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tool_tokens_are_in_no_normaliser_c19(loss_type: LossType) -> None:
    short = [make_sample("a", 10, 1, advantage=-1.0), make_sample("b", 1000, 1, advantage=-1.0)]
    long = [make_sample("a", 10, 5000, advantage=-1.0), make_sample("b", 1000, 5000, advantage=-1.0)]
    weights = sample_weights(long, loss_type, max_trajectory_tokens=2000)
    assert weights == sample_weights(short, loss_type, max_trajectory_tokens=2000)
    # Documented: the same for every trained token, for every trajectory, or a constant that no length has a say in.
    token, trajectory, constant = [1 / 1010, 1 / 1010], [1 / 20, 1 / 2000], [1 / 4000, 1 / 4000]
    expected = {"dapo": token, "cispo": token, "grpo": trajectory, "rloo": trajectory, "dr_grpo": constant}
    assert weights == expected[loss_type]


def make_group(rewards: Sequence[float | None], stops: Sequence[StopReason], observed: int = 2) -> TrajectoryGroup:
    trajectories = []
    for index, (reward, stop) in enumerate(zip(rewards, stops, strict=True)):
        sampled = 3 + index
        stream = TokenStream()
        stream.append(Segment(source=Source.PROMPT, token_ids=(9, 10)))
        stream.append(
            Segment(
                source=Source.MODEL,
                token_ids=(11 + index,) * sampled,
                completion_id=f"g/{index}/0",
                logprobs=(-1.0,) * sampled,
                policy_version=(0,) * sampled,
            )
        )
        stream.append(Segment(source=Source.TOOL, token_ids=(12,) * observed))
        trajectories.append(
            Trajectory(
                trajectory_id=f"g/{index}",
                task_id="t",
                group_id="g",
                sibling_index=index,
                streams=(stream,),
                turns=(),
                stop_reason=stop,
                reward=reward,
            )
        )
    return TrajectoryGroup(group_id="g", task=Task(task_id="t", prompt="?"), trajectories=tuple(trajectories))


def test_tool_tokens_are_in_no_mean_length_c19() -> None:
    stops = [StopReason.FINAL_ANSWER] * 2
    short, long = (summarise(make_group([1.0, 0.0], stops, n).trajectories) for n in (1, 5000))
    assert short["length/mean"] == long["length/mean"] == (3 + 4) / 2


def make_learner(
    model: Any,
    loss_type: LossType = "dapo",
    max_micro_batch_tokens: int = 4096,
    reference: Any = None,
    **options: Any,
) -> Learner:
    bounds: dict[str, Any] = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    return Learner(
        model,
        Accelerator(cpu=True),
        config=GrpoConfig(loss_type=loss_type, max_micro_batch_tokens=max_micro_batch_tokens, **(bounds | options)),
        optimizer=OptimizerConfig(),
        temperature=TEMPERATURE,
        max_trajectory_tokens=MAX_TRAJECTORY_TOKENS,
        reference=reference,
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_without_a_trained_token_is_no_batch_c01(loss_type: LossType) -> None:
    """Every trajectory cut: nothing is packed, so there is no denominator to be zero."""
    group = make_group([1.0, 0.0, 1.0], [StopReason.TOKEN_BUDGET] * 3)
    samples = group_samples(group, step_advantages(group.trajectories, GrpoConfig()), mask_truncated=True)
    assert {reason for sample in samples for reason in sample.excluded} == {None, Excluded.TRUNCATED}
    assert make_learner(tiny_model(), loss_type).pack(samples) == []
    assert make_learner(tiny_model(), loss_type).pack([]) == []


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_samples_without_a_trained_token_change_nothing_c01(loss_type: LossType) -> None:
    good = on_policy_samples()
    masked = [make_sample("masked", 20, excluded=Excluded.TRUNCATED)]
    assert_same(gradient_of(good, loss_type), gradient_of([*masked, *good, *masked], loss_type))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_micro_batch_without_a_trained_token_among_others_changes_nothing_c01(loss_type: LossType) -> None:
    """None is packed; one that is there all the same is a zero, with no NaN in any gradient or metric."""
    learner = make_learner(tiny_model(), loss_type, 100, beta=0.1, reference=tiny_model(seed=1))
    batches = learner.pack(on_policy_samples())
    empty = replace(batches[0], loss_mask=torch.zeros_like(batches[0].loss_mask))
    empty = replace(empty, loss_weights=torch.zeros_like(empty.loss_weights))
    expected = learner.gradient(batches)
    before = gradients(learner.model)
    assert learner.gradient([empty, *batches, empty]) == expected
    assert_same(gradients(learner.model), before)
    metrics = learner.gradient([empty])
    assert metrics["loss"] == metrics["entropy"] == metrics["kl/mean"] == 0.0
    assert all(not gradient.any() for gradient in gradients(learner.model).values())


def test_a_cut_trajectory_is_in_no_count_a29() -> None:
    """A group of four, one cut by a limit of ours: neither trained-token count nor normaliser know it."""
    stops = [StopReason.FINAL_ANSWER] * 3 + [StopReason.MAX_TURNS]
    group = make_group([1.0, 0.0, 1.0, 0.0], stops)
    samples, metrics = samples_and_metrics([group], GrpoConfig(mask_truncated_completions=True), trained_version=0)
    assert [sum(sample.loss_mask) for sample in samples] == [3, 4, 5, 0]
    assert metrics["tokens/trained"] == 3 + 4 + 5
    assert metrics["tokens/excluded/truncated"] == 6
    assert sample_weights(samples, "dapo") == [1 / 12, 1 / 12, 1 / 12, 0.0]
    assert sample_weights(samples, "grpo") == [1 / (3 * 3), 1 / (3 * 4), 1 / (3 * 5), 0.0]
    (batch,) = make_learner(tiny_model()).pack(samples)
    assert {placement.sample.trajectory_id for placement in batch.placements} == {"g/0", "g/1", "g/2"}
    assert batch.loss_weights.sum().item() == pytest.approx(1.0)


def test_what_a_trajectory_ended_with_decides_and_no_token_id_c31() -> None:
    """The second was cut and the others were not, whatever ids they end with: the model's stop id, or another."""
    group = make_group([1.0, 0.0, 1.0], [StopReason.FINAL_ANSWER, StopReason.TURN_TOKENS, StopReason.FINAL_ANSWER])
    samples, metrics = samples_and_metrics([group], GrpoConfig(mask_truncated_completions=True), trained_version=0)
    assert [any(sample.loss_mask) for sample in samples] == [True, False, True]
    assert sample_weights(samples, "dapo") == [1 / 8, 0.0, 1 / 8]
    stopped = [replace(sample, token_ids=(*sample.token_ids[:-1], 3)) for sample in samples]
    assert sample_weights(stopped, "dapo") == [1 / 8, 0.0, 1 / 8]
    assert metrics["tokens/excluded/truncated"] == 4


def test_a_token_that_a_template_put_in_has_no_ratio_c32() -> None:
    """It has a logprob of 0 for want of one; trained, its ratio would be its probability."""
    builder = SampleBuilder("t")
    builder.add_context(Segment(source=Source.PROMPT, token_ids=(9, 10)))
    segment = Segment(
        source=Source.MODEL, token_ids=(11, 12), completion_id="t/0", logprobs=(-4.5, -4.5), policy_version=(0, 0)
    )
    builder.add_sampled(segment, advantage=1.0, excluded=None)
    builder.add_context(Segment(source=Source.TEMPLATE, token_ids=(3,)))
    sample = builder.build()
    assert sample_weights([sample], "dapo") == [1 / 2]
    learner = make_learner(tiny_model())
    (batch,) = learner.pack([sample])
    assert batch.sampled_logprobs[batch.loss_mask].tolist() == [-4.5, -4.5]
    metrics = learner.gradient([batch])
    expected = gradients(learner.model)
    (longer,) = learner.pack([replace(sample, sampled_logprobs=(0.0, 0.0, -4.5, -4.5, -7.0))])
    assert learner.gradient([longer]) == metrics
    assert_same(gradients(learner.model), expected)


@no_clock
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), loss_type=st.sampled_from(SUMMING_TO_ONE))
def test_the_weights_of_a_step_sum_to_one(lengths: list[int], loss_type: LossType) -> None:
    samples = [
        make_sample(str(index), max(n, 1), excluded=None if n else Excluded.STALE) for index, n in enumerate(lengths)
    ]
    weights = sample_weights(samples, loss_type)
    total = sum(weight * sum(sample.loss_mask) for weight, sample in zip(weights, samples, strict=True))
    assert total == pytest.approx(1.0 if any(lengths) else 0.0)


# The gradient.


@cache
def on_policy_samples() -> tuple[TrainingSample, ...]:
    """Samples near the policy, some tokens inside the clip and some outside, with both signs of advantages."""
    model = tiny_model().eval()
    rng = random.Random(0)
    samples = []
    for sample in random_samples(7, advantages=[1.0, -1.0, 0.5, 0.0, 2.0, -0.5, 1.0]):
        logprobs = [0.0, *(value + rng.uniform(-0.5, 0.5) for value in score(model, list(sample.token_ids)))]
        kept = [value if trained else 0.0 for value, trained in zip(logprobs, sample.loss_mask, strict=True)]
        samples.append(replace(sample, sampled_logprobs=tuple(kept)))
    return tuple(samples)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def gradient_of(
    samples: Sequence[TrainingSample], loss_type: LossType, max_micro_batch_tokens: int = 4096, **options: Any
) -> dict[str, Tensor]:
    learner = make_learner(tiny_model(), loss_type, max_micro_batch_tokens, **options)
    learner.gradient(learner.pack(samples))
    return gradients(learner.model)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > 1e-2, "nothing is compared"
    atol = 2e-6 * max(largest, 1.0)  # a product of ratios has larger gradients
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=atol, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@cache
def two_stream_samples() -> tuple[TrainingSample, ...]:
    """The same, of four trajectories: two of them have several streams, which do not lie side by side."""
    names = ["t0", "t1", "t2", "t3", "t1", "t0", "t0"]
    return tuple(replace(s, trajectory_id=name) for s, name in zip(on_policy_samples(), names, strict=True))


@cache
def reference(loss_type: LossType, samples: tuple[TrainingSample, ...] | None = None) -> dict[str, Tensor]:
    """One forward over full logits for each sample alone, the formula written out, and one sum. In the first update
    every ratio to the old policy is 1, so the surrogate's gradient is the advantage times the logprob's."""
    model = tiny_model()
    samples = samples or on_policy_samples()
    trained = Counter[str]()
    for sample in samples:
        trained[sample.trajectory_id] += sum(sample.loss_mask)
    loss = torch.zeros(())
    for sample in samples:
        n = trained[sample.trajectory_id]
        ids = torch.tensor([sample.token_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / TEMPERATURE
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(sample.loss_mask[1:])
        correction = torch.exp(logprobs.detach() - torch.tensor(sample.sampled_logprobs[1:])).clamp(max=3.0)
        surrogate = torch.tensor(sample.advantages[1:]) * logprobs * correction
        scale = n if loss_type == "rloo" else 1  # the gradient of a product of ratios
        tokens, constant = trained.total(), len(trained) * MAX_TRAJECTORY_TOKENS
        divisors = {"dapo": tokens, "cispo": tokens, "dr_grpo": constant}
        loss = loss - scale * surrogate[mask].sum() / divisors.get(loss_type, len(trained) * n)
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("max_micro_batch_tokens", "gradient_checkpointing"), [(64, False), (100, False), (257, True), (4096, False)]
)
def test_no_split_or_option_changes_the_gradient_a28(
    loss_type: LossType, max_micro_batch_tokens: int, gradient_checkpointing: bool
) -> None:
    """It is that of full logits over each sample alone, in which tool positions have no gradient."""
    found = gradient_of(
        on_policy_samples(), loss_type, max_micro_batch_tokens, gradient_checkpointing=gradient_checkpointing
    )
    assert_same(found, reference(loss_type))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("max_micro_batch_tokens", [170, 4096])
def test_the_streams_of_a_trajectory_are_one_trajectory(loss_type: LossType, max_micro_batch_tokens: int) -> None:
    """In one micro-batch where the ratio is the trajectory's, in several where it is not."""
    samples = two_stream_samples()
    learner = make_learner(tiny_model(), loss_type, max_micro_batch_tokens)
    batches = learner.pack(samples)
    assert len(batches) > 1 or max_micro_batch_tokens == 4096
    learner.gradient(batches)
    assert_same(gradients(learner.model), reference(loss_type, samples))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_neither_order_nor_packing_changes_the_gradient(loss_type: LossType) -> None:
    samples = on_policy_samples()
    learner = make_learner(tiny_model(), loss_type)
    weights = sample_weights(samples, loss_type, max_trajectory_tokens=MAX_TRAJECTORY_TOKENS)

    def packed(order: Sequence[int], max_tokens: int) -> list[MicroBatch]:
        return pack([samples[i] for i in order], [weights[i] for i in order], max_tokens=max_tokens)

    numbers = range(len(samples))
    one_by_one = [batch for i in numbers for batch in packed([i], 4096)]
    assert len(one_by_one) == len(samples)
    for batches in (one_by_one, packed(numbers[::-1], 4096), packed(numbers, 200), packed(numbers, 4096)):
        learner.gradient(batches)
        assert_same(gradients(learner.model), reference(loss_type))


def test_the_metrics_of_a_step_do_not_depend_on_the_split() -> None:
    rows = []
    for max_tokens in (64, 4096):
        learner = make_learner(tiny_model(), "dapo", max_tokens)
        rows.append(learner.gradient(learner.pack(on_policy_samples())))
    first, second = (row.pop("logprob_gap/max_token") for row in rows)
    assert first == second
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)
    assert rows[0]["ratio/mean"] == rows[0]["ratio/max"] == 1.0
    assert rows[0]["logprob_gap/max"] > rows[0]["logprob_gap/mean"] > 0


def test_the_gradient_test_sees_a_mask_shifted_by_one() -> None:
    shifted = [replace(s, loss_mask=(False, *s.loss_mask[:-1])) for s in on_policy_samples()]
    with pytest.raises(AssertionError):
        assert_same(gradient_of(shifted, "dapo"), reference("dapo"))


def test_an_update_follows_the_gradient_and_is_deterministic() -> None:
    def weights_after() -> list[Tensor]:
        learner = make_learner(tiny_model())
        metrics = learner.update(learner.pack(on_policy_samples()))
        assert metrics["grad_norm"] > 0
        return [parameter.detach().clone() for parameter in learner.model.parameters()]

    first, second = weights_after(), weights_after()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, tiny_model().parameters(), strict=True))


def test_an_infinite_gradient_updates_nothing() -> None:
    learner = make_learner(tiny_model())
    huge = [replace(s, advantages=tuple(a * 1e38 for a in s.advantages)) for s in on_policy_samples()]
    with pytest.raises(
        ValueError, match=r"the gradient norm is .*; nothing was updated\. .* token t\d: t\d/\d\[\d+\], by"
    ):
        learner.update(learner.pack(huge))
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), tiny_model().parameters(), strict=True))
