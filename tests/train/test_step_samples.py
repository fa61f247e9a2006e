"""What a step makes of its groups: too old a trajectory is left out and counted, and its age is a metric."""

from __future__ import annotations

import pytest

from data.types import Excluded
from envs.types import Task
from rollouts.types import TrajectoryGroup
from tests.train.mask_rows import pair
from train.config import GrpoConfig
from train.step_samples import samples_and_metrics

SAMPLED_WITH = 3


def group() -> TrajectoryGroup:
    trajectories = pair()
    task = Task(task_id=trajectories[0].task_id, prompt="")
    return TrajectoryGroup(group_id=trajectories[0].group_id, task=task, trajectories=tuple(trajectories))


@pytest.mark.parametrize(("staleness", "trained"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_trajectory_that_is_too_old_is_left_out_and_counted(staleness: int, trained: bool) -> None:
    config = GrpoConfig(max_staleness=staleness)
    samples, row = samples_and_metrics([group()], config, trained_version=SAMPLED_WITH + 2)
    assert all(any(sample.loss_mask) == trained for sample in samples)
    sampled = sum(len(s.token_ids) for t in group().trajectories for stream in t.streams for s in stream if s.logprobs)
    assert row["tokens/trained"] == (sampled if trained else 0)
    assert row.get("tokens/excluded/stale", 0) == (0 if trained else sampled)
    assert {reason for sample in samples for reason in sample.excluded} == {None} | (
        set() if trained else {Excluded.STALE}
    )
    assert (row["staleness/mean"], row["staleness/max"]) == (2, 2)
