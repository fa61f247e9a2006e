"""Which samples go together: all of them once, within the budget, siblings beside each other, no process with more to
do than another, the same every time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import distribute
from data.prefix_tree import common_tokens, grow_tree, piece_path, sharable_tokens
from data.types import TrainingSample
from tests.data.test_collator import SYSTEM, TASK, batches_of_samples, make_sample
from tests.data.test_types import no_clock

options = {
    "samples": batches_of_samples(),
    "max_tokens": st.integers(90, 300),
    "processes": st.integers(1, 4),
    "attention_cost": st.sampled_from([0.0, 1 / 600]),
}


@settings(no_clock, max_examples=100)
@given(**options)
def test_every_sample_once_within_the_budget_and_as_many_micro_batches_for_every_process(
    samples: list[TrainingSample], max_tokens: int, processes: int, attention_cost: float
) -> None:
    def made() -> list[list[int]]:
        return distribute(samples, max_tokens=max_tokens, processes=processes, attention_cost=attention_cost)

    batches = made()
    assert sorted(index for batch in batches for index in batch) == list(range(len(samples)))
    assert len(batches) % processes == 0
    assert all(len(grow_tree([samples[i] for i in batch]).token_ids) <= max_tokens for batch in batches)
    assert not all(not batch for batch in batches[-processes:]), "a round of empty micro-batches"
    assert made() == batches


@settings(no_clock, max_examples=60)
@given(samples=batches_of_samples())
def test_a_tree_spells_every_sample(samples: list[TrainingSample]) -> None:
    tree = grow_tree(samples)
    leaves = set(tree.leaves)
    assert len(leaves) == len(samples)
    assert not leaves & {piece.parent for piece in tree.pieces}, "a sample ends in a piece of its own"
    for sample, leaf in zip(samples, tree.leaves, strict=True):
        pieces = [tree.pieces[i] for i in piece_path(tree.pieces, leaf)]
        assert tuple(token for p in pieces for token in tree.token_ids[p.start : p.stop]) == sample.token_ids
        assert pieces[-1].start <= pieces[-1].stop - (len(sample) - sharable_tokens(sample))
    assert len(tree.token_ids) <= sum(len(sample) for sample in samples)


def test_nested_beginnings_by_hand() -> None:
    """All have the system text; two of them the task too; one has nothing in common with the others."""
    samples = [make_sample(i, p, 2) for i, p in enumerate([SYSTEM + TASK, (8, 9), SYSTEM + TASK, (*SYSTEM, 8)])]
    tree = grow_tree(samples)
    assert [(len(piece), piece.parent) for piece in tree.pieces] == [
        (40, None), (30, 0), (3, 1), (3, 1), (4, 0), (5, None),
    ]  # fmt: skip
    assert tree.leaves == [2, 5, 3, 4]


def test_what_saves_next_to_nothing_is_not_shared() -> None:
    samples = [make_sample(i, (8, 9, 10), 4) for i in range(2)]
    assert common_tokens(*samples) == 3
    assert len(grow_tree(samples).pieces) == 2


def test_the_prompt_of_a_sample_may_be_the_beginning_of_another() -> None:
    samples = [make_sample(0, SYSTEM, 2), make_sample(1, SYSTEM + TASK, 2)]
    tree = grow_tree(samples)
    assert [len(piece) for piece in tree.pieces] == [40, 3, 33]


def test_the_same_prompt_twice_is_shared_whatever_follows() -> None:
    same = make_sample(0, SYSTEM, 2)
    tree = grow_tree([same, same])
    assert [len(piece) for piece in tree.pieces] == [40, 3, 3]
    assert tree.leaves == [1, 2]


def groups(count: int, siblings: int, prompt: int, *, seed: int = 0) -> list[TrainingSample]:
    """Siblings in a random order, with answers of 100 to 300 tokens."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(8, 900) for _ in range(prompt)) for _ in range(count)]
    made = [make_sample(i, prompts[i % count], rng.randint(100, 300)) for i in range(count * siblings)]
    rng.shuffle(made)
    return made


def test_siblings_stay_together() -> None:
    """Eight groups of eight with a prompt as long as their answers: a group's prompt is computed twice at most."""
    samples = groups(8, 8, 200)
    batches = distribute(samples, max_tokens=2000)
    computed = sum(len(grow_tree([samples[i] for i in batch]).token_ids) for batch in batches)
    alone = sum(len(sample) for sample in samples)
    assert computed <= alone - (64 - 16) * 200
    assert len(batches) <= computed / 2000 + 3


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("attention_cost", [0.0, 1 / 600])
def test_micro_batches_and_processes_have_about_as_much_to_do(processes: int, attention_cost: float) -> None:
    samples = groups(8, 8, 100)

    def cost(batch: list[int]) -> float:
        pairs = sum(len(samples[i]) ** 2 / 2 for i in batch)
        return len(grow_tree([samples[i] for i in batch]).token_ids) + attention_cost * pairs

    batches = distribute(samples, max_tokens=2000, processes=processes, attention_cost=attention_cost)
    costs = [cost(batch) for batch in batches]
    longest = max(len(sample) for sample in samples)
    mean = sum(costs) / len(costs)
    assert max(costs) <= mean + longest + attention_cost * longest**2 / 2
    # Those that are computed at the same time differ less than any two.
    rounds = [costs[first : first + processes] for first in range(0, len(costs), processes)]
    assert sum(max(row) - min(row) for row in rounds) <= max(costs) - min(costs)
    sums = [sum(costs[process::processes]) for process in range(processes)]
    assert max(sums) - min(sums) <= max(costs) - min(costs)


def test_trajectories_stay_whole_when_asked() -> None:
    """Streams of a trajectory that begin differently are far apart in the order of beginnings."""
    samples = [make_sample(i, (8 + i,) * 20, 20, trajectory=f"t{i % 4}") for i in range(12)]
    apart = distribute(samples, max_tokens=130)
    whole = distribute(samples, max_tokens=130, whole_trajectories=True)
    assert any(len({samples[i].trajectory_id for i in batch}) > 1 for batch in apart)
    homes = Counter(name for batch in whole for name in {samples[i].trajectory_id for i in batch})
    assert homes == Counter({f"t{i}": 1 for i in range(4)})


def test_what_does_not_fit_is_named() -> None:
    samples = [make_sample(0, (8,) * 4, 8), make_sample(1, (9,), 1)]
    with pytest.raises(
        ValueError, match=r"^a sample has 13 tokens \(trajectory t0\); raise max_micro_batch_tokens \(n"
    ):
        distribute(samples, max_tokens=12)
    streams = [make_sample(i, (8 + i,) * 4, 8, trajectory="a") for i in range(2)]
    assert len(distribute(streams, max_tokens=13)) == 2
    with pytest.raises(
        ValueError, match=r"^the samples of a trajectory, which must stay together, have 26 tokens \(tr"
    ):
        distribute(streams, max_tokens=13, whole_trajectories=True)


def test_no_samples_are_no_micro_batches() -> None:
    assert distribute([], max_tokens=10, processes=4) == []
