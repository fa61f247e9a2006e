"""Which samples go through the model together? Micro-batches within a budget of computed tokens, of about equal cost,
the same number for every process. No torch.

Samples with the same beginning stay together, since what they share is computed once (`data.prefix_tree`): in the order
of their beginnings they are cut into runs whose dearest is as cheap as it can be (the linear partition problem). To
give the longest sample to the emptiest micro-batch would balance a little better, and tear siblings apart: each would
need a copy of their prompt.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from data.prefix_tree import common_tokens, grow_tree, sharable_tokens, sharing_pays
from data.types import TrainingSample

_HALVINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Samples that must stay together. tokens: computed when they are alone; shared: of these, had from the unit before
    it in the same micro-batch; attention: cost of all pairs that see each other, in tokens."""

    indices: tuple[int, ...]
    tokens: int
    shared: int
    attention: float


def distribute(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    processes: int = 1,
    whole_trajectories: bool = False,
    attention_cost: float = 0.0,
) -> list[list[int]]:
    """Indices of samples for each micro-batch, ascending; micro-batch i is for process i % `processes`.

    Each process gets the same number of micro-batches, some of which may be empty. Those that different processes
    compute at the same time are of about equal cost, and so are the processes' sums. The same arguments give the same
    micro-batches.

    Args:
        max_tokens: computed tokens of a micro-batch, what is shared counted once.
        whole_trajectories: keep the samples of a trajectory in one micro-batch.
        attention_cost: of one token seeing another, where a token's linear layers cost 1.

    Raises:
        ValueError: what must stay together has more than `max_tokens` tokens.

    Of three samples of 5, 3 and 2 tokens, with room for 6: `[[0], [1, 2]]`.
    """
    if not samples:
        return []
    units = _units(samples, max_tokens, whole_trajectories, attention_cost)
    room = max_tokens
    while True:
        runs = _fewest_cheapest(units, room, processes)
        batches = [[index for unit in run for index in unit.indices] for run in runs]
        over = max(len(grow_tree([samples[i] for i in batch]).token_ids) for batch in batches) - max_tokens
        if over <= 0:
            break
        room -= over  # sharing was estimated from neighbours, and is a little less
    by_cost = sorted(range(len(runs)), key=lambda i: (-_cost(runs[i]), i))
    ordered = [sorted(batches[i]) for i in by_cost]
    ordered += [[] for _ in range(-len(ordered) % processes)]
    rounds = [ordered[first : first + processes] for first in range(0, len(ordered), processes)]
    # Every other round the other way round, so that no process always gets the dearest.
    return [batch for number, row in enumerate(rounds) for batch in (row[::-1] if number % 2 else row)]


def _units(
    samples: Sequence[TrainingSample], max_tokens: int, whole_trajectories: bool, attention_cost: float
) -> list[_Unit]:
    """In the order of their beginnings, so that whoever shares is beside each other."""
    members: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.trajectory_id if whole_trajectories else index, []).append(index)
    beginnings = {m[0]: samples[m[0]].token_ids[: sharable_tokens(samples[m[0]])] for m in members.values()}
    units: list[_Unit] = []
    before: TrainingSample | None = None
    for indices in sorted(members.values(), key=lambda m: (beginnings[m[0]], m[0])):
        tokens = len(grow_tree([samples[i] for i in indices]).token_ids)
        first = samples[indices[0]]
        if tokens > max_tokens:
            what = (
                "a sample has" if len(indices) == 1 else "the samples of a trajectory, which must stay together, have"
            )
            raise ValueError(
                f"{what} {tokens} tokens (trajectory {first.trajectory_id}); raise max_micro_batch_tokens "
                f"(now {max_tokens})"
            )
        common = 0 if before is None else common_tokens(before, first)
        units.append(
            _Unit(
                indices=tuple(indices),
                tokens=tokens,
                shared=common if sharing_pays(2, 0, common) else 0,
                attention=attention_cost * sum(len(samples[i]) ** 2 / 2 for i in indices),
            )
        )
        before = first
    return units


def _fewest_cheapest(units: Sequence[_Unit], room: int, processes: int) -> list[list[_Unit]]:
    """Runs of units: as few as the room allows, rounded up to fill all processes; of these the most even."""
    count = len(_cut(units, room, math.inf))
    count = processes * math.ceil(count / processes)
    low, high = 0.0, _cost(units)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if len(_cut(units, room, middle)) <= count:
            high = middle
        else:
            low = middle
    return _cut(units, room, high)


def _cut(units: Sequence[_Unit], room: int, max_cost: float) -> list[list[_Unit]]:
    """Runs of units in their order, each as long as room and cost allow, at least one unit."""
    runs: list[list[_Unit]] = []
    tokens = cost = 0.0
    for unit in units:
        more = unit.tokens - unit.shared
        if runs and tokens + more <= room and cost + more + unit.attention <= max_cost:
            runs[-1].append(unit)
            tokens, cost = tokens + more, cost + more + unit.attention
        else:
            runs.append([unit])
            tokens, cost = unit.tokens, unit.tokens + unit.attention
    return runs


def _cost(run: Sequence[_Unit]) -> float:
    """Of a micro-batch, in tokens: what its linear layers compute, and its attention."""
    shared = sum(unit.shared for unit in itertools.islice(run, 1, None))
    return sum(unit.tokens + unit.attention for unit in run) - shared
