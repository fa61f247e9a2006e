"""What does a step learn from the groups that it takes? Groups → advantages → samples, and the metrics of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from data.collator import MicroBatch, check_layout, unpack
from data.gate import check_batch
from data.ledger import Ledger
from data.types import TrainingSample
from rollouts.samples import gives_no_gradient, group_samples
from rollouts.summary import summarise
from rollouts.types import Trajectory, TrajectoryGroup
from train.advantages import advantage_metrics, step_advantages
from train.config import GrpoConfig


def samples_and_metrics(
    trained: Sequence[TrajectoryGroup],
    config: GrpoConfig,
    *,
    trained_version: int,
    replaced: Sequence[TrajectoryGroup] = (),
) -> tuple[list[TrainingSample], dict[str, Any]]:
    """The samples of a step, and the row of metrics that describes its sampling. `trained_version` counts the updates
    of the weights that the step changes. Dead groups that were `replaced` are shown and accounted for, and are in no
    mean and no scale of the others."""
    advantages = step_advantages([t for group in trained for t in group.trajectories], config)
    for group in replaced:
        advantages |= step_advantages(group.trajectories, config)
    groups = [*trained, *replaced]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    samples = [
        sample
        for group in groups
        for sample in group_samples(
            group,
            advantages,
            mask_truncated=config.mask_truncated_completions,
            oldest_version=trained_version - config.max_staleness,
        )
    ]
    excluded = Counter(reason.value for sample in samples for reason in sample.excluded if reason is not None)
    row = summarise(trajectories, [trajectory for group in groups for trajectory in group.lost])
    row |= {
        "groups/dead": sum(gives_no_gradient(group, advantages) for group in groups) / len(groups),
        "tokens/total": sum(len(sample) for sample in samples),
        "tokens/trained": sum(sum(sample.loss_mask) for sample in samples),
    }
    row |= advantage_metrics(samples) | _staleness(trajectories, trained_version)
    return samples, row | {f"tokens/excluded/{reason}": count for reason, count in excluded.items()}


def why_lost(trajectories: Sequence[Trajectory]) -> str | None:
    """Why a step without a graded trajectory ends the run: the next one would fare no better, and a run of such steps
    would look finished."""
    if any(trajectory.usable_reward is not None for trajectory in trajectories):
        return None
    return f"none of its {len(trajectories)} trajectories could be graded: {trajectories[0].cause}"


def mini_batches(samples: Sequence[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """`samples` in `count` parts of about equal size, each with trajectories of as many groups as there are.

    Siblings are dealt out one by one, so a part holds the successes and the failures of a group together as a rule. The
    samples of a trajectory stay together: its ratio and its mean are over all of them.
    """
    turn = {name: number % count for number, name in enumerate(dict.fromkeys(s.trajectory_id for s in samples))}
    return [[sample for sample in samples if turn[sample.trajectory_id] == part] for part in range(count)]


def packed_samples(updates: Sequence[Sequence[MicroBatch]], samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """What the tensors of a step hold, and the samples that are not trained, in the order of `samples`: so a dump can
    be shared out again as the run did."""
    place = {(sample.trajectory_id, sample.completion_ids): number for number, sample in enumerate(samples)}
    packed = [sample for update in updates for batch in update for sample in unpack(batch)]
    packed += [sample for sample in samples if not any(sample.loss_mask)]
    return sorted(packed, key=lambda sample: place[sample.trajectory_id, sample.completion_ids])


def check_updates(updates: Sequence[Sequence[MicroBatch]], packed: Sequence[TrainingSample], ledger: Ledger) -> None:
    """The gate before a step's first update.

    Raises:
        GateError: the layout of a micro-batch is wrong, or it does not hold what the ledger says was sampled.
    """
    for update in updates:
        for batch in update:
            check_layout(batch)
    check_batch(packed, ledger)


def _staleness(trajectories: Sequence[Trajectory], trained_version: int) -> dict[str, float]:
    """How many updates the oldest token of each trajectory is behind the weights that are trained now."""
    ages = [trained_version - trajectory.oldest_version for trajectory in trajectories if trajectory.completion_ids]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)} if ages else {}
