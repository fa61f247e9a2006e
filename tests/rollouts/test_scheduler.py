"""Groups: each trajectory waits only for itself, and what one costs nobody else pays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from data.gate import check_batch
from data.ledger import Ledger
from data.types import Completion, Excluded, SamplingParams
from envs.sandbox.local import LocalFactory
from envs.types import Task
from rollouts.config import ScheduleConfig
from rollouts.engine import Engine, RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.runner import completion_seed
from rollouts.samples import group_samples
from rollouts.scheduler import sample_groups
from rollouts.summary import sampled_tokens
from rollouts.types import StopReason, Trajectory
from tests.rollouts.desk import (
    TASK,
    Desk,
    in_sandboxes,
    make_runner,
    say,
)
from train.advantages import step_advantages
from train.config import GrpoConfig


def run_groups(engine: Engine, tasks: Sequence[Task], num_generations: int, **limits: float) -> list[Trajectory]:
    ledger = Ledger()
    recording = RecordingEngine(engine, ledger)
    groups = in_sandboxes(
        lambda sandboxes: sample_groups(
            make_runner(recording, sandboxes, **limits),
            tasks,
            num_generations=num_generations,
            prefix="step-1",
            schedule=ScheduleConfig(infrastructure_retries=0),
        )
    )
    for group in groups:
        # The law of the mask holds whatever failed.
        advantages = step_advantages(group.trajectories, GrpoConfig())
        group_ledger = Ledger()
        for completion in ledger:
            if completion.completion_id.startswith(f"{group.group_id}/"):
                group_ledger.record(completion)
        report = check_batch(group_samples(group, advantages, mask_truncated=True), group_ledger)
        lost = sum(map(sampled_tokens, group.failures))
        assert report.excluded[Excluded.INFRASTRUCTURE] == lost
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_two_failures_among_sixteen_cost_two_c27() -> None:
    """One engine call and one sandbox fail; the others end as if nothing had happened, and the cause is recorded."""
    calls = iter(range(1000))

    def script(prompt: Sequence[int]) -> list[int]:
        return say("", ("break", "x")) if next(calls) == 9 else say("ok")

    trajectories = run_groups(ScriptedEngine(script, fail_calls=[7]), [TASK], 16)
    assert len(trajectories) == 16
    failed = [t for t in trajectories if t.reward is None]
    assert {t.stop_reason: t.error for t in failed} == {
        StopReason.ENGINE_ERROR: "call 7 fails, as the script says",
        StopReason.SANDBOX_ERROR: "the sandbox is gone; start a new one",
    }
    assert len(failed) == 2
    assert sum(t.reward == 1.0 for t in trajectories) == 14


def test_one_that_never_returns_does_not_hold_the_others_c28() -> None:
    ended: list[StopReason] = []
    calls = iter(range(1000))

    def script(prompt: Sequence[int]) -> list[int]:
        return say("", ("wait", "x")) if next(calls) == 3 else say("ok")

    in_sandboxes(
        lambda sandboxes: sample_groups(
            make_runner(ScriptedEngine(script), sandboxes, wall_clock_s=2.0, tool_timeout_s=600.0),
            [TASK],
            num_generations=8,
            prefix="step-1",
            schedule=ScheduleConfig(max_trajectories=8),
            on_done=lambda trajectory: ended.append(trajectory.stop_reason),
        )
    )
    assert ended == [StopReason.FINAL_ANSWER] * 7 + [StopReason.WALL_CLOCK]


def test_an_environment_that_never_grades_costs_one_c28() -> None:
    tasks = [Task(task_id="hangs", prompt="grading hangs"), *Desk().tasks("train", 3, 0)]
    trajectories = run_groups(ScriptedEngine(lambda prompt: say("ok")), tasks, 1, wall_clock_s=2.0)
    assert [t.reward for t in trajectories] == [None, 1.0, 1.0, 1.0]
    assert trajectories[0].stop_reason is StopReason.SANDBOX_ERROR


class SeedEngine(ScriptedEngine):
    """It remembers the seed of each completion."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: say("", ("echo", "hi")))
        self.seeds: dict[str, int | None] = {}

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.seeds[completion_id] = params.seed
        return await super().generate(completion_id, prompt_ids, params)


def seeds(seed: int, prefix: str = "step-1") -> dict[str, int | None]:
    engine = SeedEngine()
    tasks = Desk().tasks("train", 2, 0)
    in_sandboxes(
        lambda sandboxes: sample_groups(
            make_runner(engine, sandboxes, seed=seed, max_turns=2),
            tasks,
            num_generations=4,
            prefix=prefix,
            schedule=ScheduleConfig(max_trajectories=8),
        )
    )
    return engine.seeds


def test_every_completion_has_its_own_seed_c25() -> None:
    first = seeds(1)
    assert len(first) == 2 * 4 * 2
    assert None not in first.values()
    assert len(set(first.values())) == len(first), "two siblings with one seed would be one trajectory twice"
    assert seeds(1) == first, "the same seed gives the same run"
    assert not set(seeds(2).values()) & set(first.values())
    assert not set(seeds(1, "step-2").values()) & set(first.values())
    assert all(value == completion_seed(1, name) for name, value in first.items())


def test_two_tasks_with_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="two tasks of one batch have the same task_id"):
        run_groups(ScriptedEngine(lambda prompt: say("ok")), [TASK, TASK], 1)


def test_no_more_than_max_concurrent_run_at_once() -> None:
    running = 0
    most = 0

    class CountingEngine(ScriptedEngine):
        """Answers three at a time: fewer than that would wait for ever."""

        async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await three.wait()
            completion = await super().generate(completion_id, prompt_ids, params)
            running -= 1
            return completion

    three = asyncio.Barrier(3)
    engine = CountingEngine(lambda prompt: say("ok"))
    (group,) = in_sandboxes(
        lambda sandboxes: sample_groups(
            make_runner(engine, sandboxes),
            [TASK],
            num_generations=9,
            prefix="p",
            schedule=ScheduleConfig(max_trajectories=3),
        )
    )
    assert most == 3
    assert [trajectory.stop_reason for trajectory in group.trajectories] == [StopReason.FINAL_ANSWER] * 9


def test_no_sandbox_outlives_its_trajectory(tmp_path: Path) -> None:
    factory = LocalFactory(tmp_path)
    script = [say("", ("break", "x")), say("", ("crash", "x")), say("ok"), say("", ("block", "x"))]
    runner = make_runner(ScriptedEngine(script), factory, wall_clock_s=2.0)

    (group,) = asyncio.run(
        sample_groups(runner, [TASK], num_generations=4, prefix="p", schedule=ScheduleConfig(infrastructure_retries=0))
    )
    assert len(group.failures) == 2
    assert list(tmp_path.iterdir()) == []
    asyncio.run(factory.close())
