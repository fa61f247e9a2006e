"""How does a trajectory end? With an answer, or at a limit; and what is graded then."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from data.ledger import Ledger
from data.types import Source
from envs.lookup_calc import LookupCalc
from envs.types import Message
from rollouts.engine import RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.types import StopReason
from tests.rollouts.desk import (
    RENDERER,
    TASK,
    TOKENIZER,
    Desk,
    attempt,
    check_record,
    in_sandboxes,
    make_runner,
    observations,
    raw,
    say,
)


def test_a_final_answer_ends_it_and_is_graded() -> None:
    trajectory = attempt(ScriptedEngine([say("", ("echo", "hi")), say("ok")]))
    assert trajectory.stop_reason is StopReason.FINAL_ANSWER
    assert trajectory.reward == 1.0
    assert trajectory.reward_terms == {"ok": 1.0}
    assert trajectory.error is None
    assert [turn.message.content for turn in trajectory.turns] == ["", "ok"]
    assert [result.content for result in observations(trajectory)] == ["hi"]


def test_max_turns() -> None:
    trajectory = attempt(ScriptedEngine(lambda prompt: say("", ("echo", "hi"))), max_turns=3)
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.reward) == (StopReason.MAX_TURNS, 3, 0.0)


@pytest.mark.parametrize(
    "limits", [{"max_turn_tokens": 3}, {"max_trajectory_tokens": 3}], ids=["of a turn", "of a trajectory"]
)
def test_token_budget_cuts_a_turn(limits: dict[str, float]) -> None:
    trajectory = attempt(ScriptedEngine([say("ok and much more")]), **limits)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert trajectory.reward == 0.0, "half an answer is no answer"
    assert len(trajectory.streams[0].segments[-1].token_ids) == 3
    assert len(trajectory.turns) == 1


def test_token_budget_spent_between_turns() -> None:
    first = say("", ("echo", "hi"))
    trajectory = attempt(ScriptedEngine([first]), max_trajectory_tokens=len(first))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TOKEN_BUDGET, 1)


def test_half_a_call_is_not_run() -> None:
    asked = say("", ("crash", "x"))
    trajectory = attempt(ScriptedEngine([asked]), max_turn_tokens=len(asked) - 1)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert observations(trajectory) == []


def opening_length() -> int:
    return len(RENDERER.opening(Desk().opening(TASK), Desk.tools)[0].token_ids)


@pytest.mark.parametrize("room", [-5, 0])
def test_a_prompt_that_fills_the_context(room: int) -> None:
    engine = ScriptedEngine([], max_context_tokens=opening_length() + room)
    trajectory = attempt(engine)
    assert (trajectory.stop_reason, trajectory.turns, engine.prompts) == (StopReason.CONTEXT_FULL, (), [])


def test_a_turn_that_fills_the_context() -> None:
    engine = ScriptedEngine([say("ok and much more")], max_context_tokens=opening_length() + 3)
    trajectory = attempt(engine)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert len(trajectory.streams[0]) == engine.max_context_tokens


@pytest.mark.parametrize("length", [100, 100_000])
def test_an_observation_that_fills_the_context_a09(length: int) -> None:
    """It is left out of the stream: a sample is never longer than the context, so it always fits a micro-batch."""
    asked = say("", ("echo", "7" * 10))
    engine = ScriptedEngine(
        [asked, say("", ("echo", "7" * length))], max_context_tokens=opening_length() + 2 * len(asked) + 200
    )
    trajectory = attempt(engine, max_turn_tokens=150_000, max_trajectory_tokens=300_000)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert len(trajectory.streams[0]) <= engine.max_context_tokens


def test_an_observation_longer_than_the_context_is_left_out() -> None:
    engine = ScriptedEngine([say("", ("echo", "7"))], max_context_tokens=opening_length() + len(say("", ("echo", "7"))))
    trajectory = attempt(engine)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert trajectory.streams[0].segments[-1].source is Source.MODEL
    assert [result.content for result in observations(trajectory)] == ["7"], "it is on record all the same"


def test_wall_clock_ends_a_slow_engine() -> None:
    trajectory = attempt(ScriptedEngine([say("ok")], delay_s=600.0), wall_clock_s=0.2)
    assert (trajectory.stop_reason, trajectory.reward, trajectory.error) == (StopReason.WALL_CLOCK, 0.0, None)


def test_wall_clock_ends_a_tool_that_never_returns() -> None:
    trajectory = attempt(ScriptedEngine([say("", ("wait", "x"))]), wall_clock_s=0.2, tool_timeout_s=600.0)
    assert trajectory.stop_reason is StopReason.WALL_CLOCK
    assert trajectory.stop_reason.is_truncated


def test_parse_errors_in_a_row_end_it() -> None:
    bad, good = raw("<tool_call>{oops</tool_call>"), say("", ("echo", "hi"))
    trajectory = attempt(ScriptedEngine([bad, good, bad, bad]), max_parse_errors=2)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.PARSE_ERRORS, 4)
    assert trajectory.reward == 0.0


def test_the_agent_of_the_textbooks_earns_its_reward() -> None:
    """The environment, the sandbox, the renderer and the runner together: the plan's calls, then the answer."""
    env = LookupCalc(mistake_rate=0.0)
    (task,) = [task for task in env.tasks("train", 40, 0) if task.metadata["calls"] == 3][:1]

    class Demonstrator(ScriptedEngine):
        """Says what the environment's demonstrator says."""

        def __init__(self) -> None:
            super().__init__(lambda prompt: RENDERER.turn_ids(self._next(prompt)))

        def _next(self, prompt: Sequence[int]) -> Message:
            text = TOKENIZER.decode(list(prompt), skip_special_tokens=False)
            replies = str(text).split("<|im_start|>tool\n")[1:]
            results = [Message(role="tool", content=r.split("<|im_end|>")[0], call_id="c") for r in replies]
            return env.demonstrate(task, [*env.opening(task), *results], 0)

    ledger = Ledger()
    engine = Demonstrator()
    recording = RecordingEngine(engine, ledger)
    trajectory = in_sandboxes(
        lambda sandboxes: make_runner(recording, sandboxes, env=env).run(task, group_id="g", sibling_index=0)
    )
    check_record(trajectory, ledger, engine)
    assert (trajectory.stop_reason, trajectory.reward, len(trajectory.turns)) == (StopReason.FINAL_ANSWER, 1.0, 4)
    assert not any(result.is_error for result in observations(trajectory))
