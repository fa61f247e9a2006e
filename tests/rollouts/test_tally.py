"""What was sampled is paid for, whatever became of it: cancelled trajectories and lost attempts too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from data.tool_formats.base import ParsedTurn
from data.types import Completion, SamplingParams
from rollouts.accounting import TokenCount, cost_usd, count_tokens, count_turns
from rollouts.config import PricesConfig, ScheduleConfig
from rollouts.engine import Engine, EngineError
from rollouts.engine_scripted import ScriptedEngine
from rollouts.runner import Runner
from rollouts.scheduler import Scheduler
from rollouts.summary import summarise
from rollouts.tally import Tally
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from scripts.open_rollouts import roll_out
from tests.rollouts.desk import RENDERER, TASK, attempt, make_runner, say
from tests.rollouts.virtual_clock import run_virtual
from tests.rollouts.workshop import CountedSandboxes, Workshop, WorkshopEngine

PRICES = PricesConfig(input=300.0, cached_input=30.0, output=1500.0)


def paid_runner(engine: Engine, *, max_turns: int = 8, wall_clock_s: float = 1e4) -> Runner:
    return make_runner(
        engine,
        CountedSandboxes(),
        env=Workshop(),
        prices=PRICES,
        wall_clock_s=wall_clock_s,
        tool_timeout_s=1e4,
        max_turns=max_turns,
    )


def cancelled(at_s: float) -> tuple[Trajectory, Tally, ScriptedEngine]:
    """A trajectory whose completions take a second and whose tools take two, cancelled after `at_s` seconds."""
    engine, tally = ScriptedEngine(lambda prompt: say("", ("work", "2")), delay_s=1.0), Tally()

    async def run() -> TrajectoryGroup:
        async with Scheduler(paid_runner(engine), ScheduleConfig(), on_done=tally.add) as scheduler:
            scheduler.submit(Workshop().tasks("train", 1, 0)[0], group_id="p/a", siblings=[0])
            asyncio.get_running_loop().call_later(at_s, scheduler.cancel, "p/a")
            return await anext(scheduler)

    (trajectory,) = run_virtual(run()).trajectories
    assert trajectory.stop_reason is StopReason.CANCELLED
    return trajectory, tally, engine


def test_what_is_cancelled_costs_what_it_had_cost() -> None:
    """After two turns, in the tool of the second: as if it had ended there by itself."""
    trajectory, tally, _ = cancelled(4.5)
    same = ScriptedEngine(lambda prompt: say("", ("work", "2")), delay_s=1.0)
    task = Workshop().tasks("train", 1, 0)[0]
    whole = run_virtual(paid_runner(same, max_turns=2).run(task, group_id="p/a", sibling_index=0))
    assert whole.stop_reason is StopReason.MAX_TURNS
    assert count_turns(trajectory.turns) == count_turns(whole.turns)
    assert trajectory.cost_usd == whole.cost_usd == tally.cost_usd > 0
    row = summarise([trajectory])
    assert row["cost/usd"] == whole.cost_usd
    assert (row["tokens/input"], row["tokens/output"]) == (
        sum(turn.prompt_tokens for turn in whole.turns),
        sum(turn.sampled_tokens for turn in whole.turns),
    )


def test_a_prompt_without_an_answer_is_paid_for() -> None:
    """It is cancelled while the second turn is sampled."""
    trajectory, _, engine = cancelled(3.5)
    first, second = map(len, engine.prompts)
    sampled = len(say("", ("work", "2")))
    count = count_turns(trajectory.turns)
    assert (count.calls, count.input, count.fresh, count.output) == (2, first + second, second, sampled)
    assert trajectory.cost_usd == cost_usd(TokenCount(input=first + second, fresh=second, output=sampled), PRICES)


class FailingEngine(ScriptedEngine):
    """Fails the second call, once it was asked."""

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        completion = await super().generate(completion_id, prompt_ids, params)
        if len(self.prompts) == 2:
            raise EngineError("the server is gone")
        return completion


@pytest.mark.parametrize(
    ("kind", "wall_clock_s", "ended"),
    [(ScriptedEngine, 3.5, StopReason.WALL_CLOCK), (FailingEngine, 1e4, StopReason.ENGINE_ERROR)],
)
def test_a_call_without_an_answer_is_paid_for_however_it_ended(
    kind: type[ScriptedEngine], wall_clock_s: float, ended: StopReason
) -> None:
    """The second one; it is no turn all the same."""
    engine = kind(lambda prompt: say("", ("work", "2")), delay_s=1.0)
    task = Workshop().tasks("train", 1, 0)[0]
    runner = paid_runner(engine, wall_clock_s=wall_clock_s)
    trajectory = run_virtual(runner.run(task, group_id="p/a", sibling_index=0))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (ended, 1)
    first, second = map(len, engine.prompts)
    sampled = len(say("", ("work", "2")))
    count = count_tokens([trajectory])
    assert (count.calls, count.input, count.fresh, count.output) == (2, first + second, second, sampled)
    cost = cost_usd(TokenCount(input=first + second, fresh=second, output=sampled), PRICES)
    tally = Tally()
    tally.add(trajectory)
    assert trajectory.cost_usd == tally.cost_usd == summarise([trajectory])["cost/usd"] == cost
    assert tally.tokens == count


def test_a_turn_that_cannot_be_read_is_paid_for() -> None:
    class Unreadable:
        def __getattr__(self, name: str) -> Any:
            return getattr(RENDERER, name)

        def parse(self, token_ids: Sequence[int], **options: Any) -> ParsedTurn:
            raise RuntimeError("a fault of the reader")

    runner = make_runner(ScriptedEngine([say("ok")]), CountedSandboxes(), renderer=Unreadable(), prices=PRICES)  # type: ignore[arg-type]
    trajectory = asyncio.run(runner.run(TASK, group_id="g", sibling_index=0))
    assert trajectory.turns == ()
    count = count_tokens([trajectory])
    assert (count.calls, count.output) == (1, len(say("ok")))
    assert trajectory.cost_usd == cost_usd(count, PRICES) > 0


def test_what_never_began_costs_nothing() -> None:
    trajectory, tally, _ = cancelled(0.0)
    assert (trajectory.turns, trajectory.cost_usd, tally.cost_usd) == ((), 0.0, 0.0)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_attempts_that_are_begun_again_are_in_the_sum(retries: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine breaks in the second turn of two siblings of each task, and again when they are begun again."""
    names = ("0/1", "0~1/1", "1/1", "1~1/1")
    engine = WorkshopEngine(8, fails=lambda name: name.split("/", 2)[2] in names)
    tally, done, groups = Tally(), list[Trajectory](), list[TrajectoryGroup]()
    missing = [(task, list(range(4))) for task in Workshop().tasks("train", 4, 0)]
    run_virtual(
        roll_out(
            paid_runner(engine),
            missing,
            prefix="p",
            schedule=ScheduleConfig(infrastructure_retries=retries),
            tally=tally,
            on_done=done.append,
            on_group=groups.append,
        )
    )
    lost = [trajectory for group in groups for trajectory in group.lost]
    assert bool(lost) == bool(retries)
    assert tally.trajectories == len(done) == 16
    assert tally.begun_again == len(lost)
    assert tally.cost_usd == pytest.approx(summarise(done, lost)["cost/usd"])
    assert (tally.cost_usd > sum(trajectory.cost_usd for trajectory in done)) == bool(lost)
    assert (f"; {len(lost)} lost attempts were begun again" in tally.line()) == bool(lost)
    assert f", ${tally.cost_usd:.4f} in all" in tally.line()


def test_details_say_why_trajectories_ended_and_what_was_read() -> None:
    """The same numbers as the metrics of a step."""
    script = [say("", ("echo", "<tool_call>"), ("ecco", "x")), say("", ("crash", "x")), say("ok")]
    trajectories = [attempt(ScriptedEngine(script)), attempt(ScriptedEngine([say("ok and more")]), max_turn_tokens=2)]
    tally = Tally()
    for trajectory in trajectories:
        tally.add(trajectory)
    row = summarise(trajectories)
    stops, tools, tokens = tally.details()
    assert stops == "ended by: final_answer 1, turn_tokens 1"
    said = "3 calls, 2 answered with an error, 1 invalid, 1 failed inside the tool; 1 control tokens spelled"
    assert tools.startswith(f"tools: {said}")
    assert (row["tools/calls"], row["tools/errors"], row["tools/invalid_calls"], row["tools/failures"]) == (3, 2, 1, 1)
    assert row["control_tokens/forged"] == 1
    assert tokens.startswith(f"tokens: {row['tokens/input']:,.0f} read in 4 calls of the model, ")
    assert f"{row['tokens/input_fresh']:,.0f} of them new to their trajectory" in tokens
    assert f"{row['tokens/output']:,.0f} sampled" in tokens
