"""A task folder through the runner: a scripted policy solves it with the tools, and a clean sandbox pays the reward."""

from __future__ import annotations

from data.ledger import Ledger
from envs.sandbox.base import SandboxFactory
from envs.task_folder import TaskFolders
from envs.types import Message
from rollouts.engine import RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.types import StopReason, Trajectory
from tests.envs.task_folders import with_factory
from tests.rollouts.desk import RENDERER, check_record, make_runner, observations


def test_a_policy_that_solves_a_task_folder_earns_its_reward() -> None:
    ledger = Ledger()

    async def work(sandboxes: SandboxFactory) -> tuple[Trajectory, ScriptedEngine]:
        env = TaskFolders(sandboxes=sandboxes)
        task = env.task("service-errors")
        first = env.demonstrate(task, env.opening(task), 0)
        last = Message(role="assistant", content="It is done.")
        engine = ScriptedEngine([RENDERER.turn_ids(first), RENDERER.turn_ids(last)], max_context_tokens=8000)
        runner = make_runner(
            RecordingEngine(engine, ledger),
            sandboxes,
            env=env,
            tool_timeout_s=60,
            max_turn_tokens=4000,
            wall_clock_s=120,
        )
        return await runner.run(task, group_id="g", sibling_index=0), engine

    trajectory, engine = with_factory("bubblewrap", work)
    check_record(trajectory, ledger, engine)
    assert trajectory.error is None
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.FINAL_ANSWER, 1.0)
    assert trajectory.reward_terms == {"success": 1.0}
    assert [result.content for result in observations(trajectory)] == ["(no output)"]
