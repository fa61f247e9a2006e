"""How does a trajectory end? With an answer, or at a limit; and what is graded then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.ledger import Ledger
from data.types import Source
from envs.lookup_calc import LookupCalc
from envs.sandbox.base import Sandbox
from envs.types import Message, Task, ToolCall, ToolResult
from rollouts.accounting import TokenCount, cost_usd
from rollouts.config import LimitsConfig, PricesConfig
from rollouts.engine import RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.limits import allowance
from rollouts.summary import summarise
from rollouts.types import StopReason
from tests.rollouts.desk import (
    RENDERER,
    TASK,
    TOKENIZER,
    Desk,
    DeskSession,
    attempt,
    check_record,
    in_sandboxes,
    make_runner,
    observations,
    raw,
    say,
)
from tests.rollouts.letters import END, Letters
from tests.rollouts.virtual_clock import run_virtual
from tests.rollouts.workshop import CountedSandboxes


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
    assert trajectory.streams[0].segments[-1].source is Source.MODEL, "nothing follows the last observation"
    assert [result.content for result in observations(trajectory)] == ["hi"] * 3


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("max_turn_tokens", StopReason.TURN_TOKENS), ("max_trajectory_tokens", StopReason.TOKEN_BUDGET)],
)
def test_tokens_run_out_in_a_turn(limit: str, reason: StopReason) -> None:
    trajectory = attempt(ScriptedEngine([say("ok and much more")]), **{limit: 3})
    assert trajectory.stop_reason is reason
    assert trajectory.stop_reason.is_truncated
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
    assert trajectory.stop_reason is StopReason.TURN_TOKENS
    assert observations(trajectory) == []


def opening_length() -> int:
    return len(RENDERER.opening(Desk().opening(TASK), Desk.tools)[0].token_ids)


@pytest.mark.parametrize("room", [-5, 0])
def test_a_prompt_that_fills_the_context_is_never_cut_a30(room: int) -> None:
    engine = ScriptedEngine([], max_context_tokens=opening_length() + room)
    trajectory = attempt(engine)
    assert (trajectory.stop_reason, trajectory.turns, engine.prompts) == (StopReason.CONTEXT_FULL, (), [])
    assert trajectory.streams == (), "a stream never holds more than the context"


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
    trajectory = attempt(engine, max_turn_tokens=150_000, max_trajectory_tokens=300_000, max_observation_tokens=200_000)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert len(trajectory.streams[0]) <= engine.max_context_tokens


def test_an_observation_longer_than_the_context_is_left_out() -> None:
    engine = ScriptedEngine([say("", ("echo", "7"))], max_context_tokens=opening_length() + len(say("", ("echo", "7"))))
    trajectory = attempt(engine)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert trajectory.streams[0].segments[-1].source is Source.MODEL
    assert [result.content for result in observations(trajectory)] == ["7"], "it is on record all the same"


@pytest.mark.parametrize(("delay_s", "reason", "turns"), [(4.0, "wall_clock", 2), (11.0, "engine_error", 0)])
def test_wall_clock_ends_a_slow_engine(delay_s: float, reason: str, turns: int) -> None:
    """A trajectory that only ever waited for its first turn says nothing about the policy."""
    engine = ScriptedEngine(lambda prompt: say("", ("echo", "hi")), delay_s=delay_s)
    runner = make_runner(engine, CountedSandboxes(), wall_clock_s=10.0)
    trajectory = run_virtual(runner.run(TASK, group_id="g", sibling_index=0))
    assert (trajectory.stop_reason.value, len(trajectory.turns)) == (reason, turns)
    assert trajectory.reward == (0.0 if turns else None)
    assert trajectory.error is None or trajectory.error.startswith("no turn was sampled within 10 s (limits.wall_clock")


def test_wall_clock_ends_a_tool_that_never_returns() -> None:
    trajectory = attempt(ScriptedEngine([say("", ("wait", "x"))]), wall_clock_s=2.0, tool_timeout_s=600.0)
    assert trajectory.stop_reason is StopReason.WALL_CLOCK
    assert trajectory.stop_reason.is_truncated


def test_a_wall_clock_that_ends_it_amid_a_call_keeps_the_turn_on_record_and_out_of_what_is_graded() -> None:
    """The turn says ok, and would earn the reward; but it had not come to its end."""
    trajectory = attempt(ScriptedEngine([say("ok", ("wait", "x"))]), wall_clock_s=2.0, tool_timeout_s=600.0)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.WALL_CLOCK, 0.0)
    assert [(turn.message.content, turn.tool_results) for turn in trajectory.turns] == [("ok", ())]


def test_parse_errors_in_a_row_end_it() -> None:
    bad, good = raw("<tool_call>{oops</tool_call>"), say("", ("echo", "hi"))
    trajectory = attempt(ScriptedEngine([bad, good, bad, bad]), max_parse_errors=2)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.PARSE_ERRORS, 4)
    assert trajectory.reward == 0.0


def test_the_environment_ends_it() -> None:
    """All calls of the turn are run and on record; no further turn is sampled."""
    trajectory = attempt(ScriptedEngine([say("", ("done", "that is it"), ("echo", "hi"))]))
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.reward) == (StopReason.ENV_DONE, 1, 0.0)
    assert [result.content for result in observations(trajectory)] == ["that is it", "hi"]
    assert not trajectory.stop_reason.is_truncated


@pytest.mark.parametrize("most", [2, 4])
def test_the_same_calls_with_the_same_results_end_it(most: int) -> None:
    trajectory = attempt(ScriptedEngine(lambda prompt: say("", ("echo", "hi"), ("ecco", "x"))), max_repeated_calls=most)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.REPEATED_CALL, most)
    assert not trajectory.stop_reason.is_truncated, "the policy's own doing is trained"


def test_another_call_between_them_begins_the_count_anew() -> None:
    same, other = say("", ("echo", "hi")), say("", ("echo", "ho"))
    trajectory = attempt(ScriptedEngine([same, same, other, same, same, same]), max_repeated_calls=3)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.REPEATED_CALL, 6)


class Counting(Desk):
    """Its tools answer how often they were called."""

    def session(self, task: Task, sandbox: Sandbox) -> CountingSession:
        return CountingSession(task, sandbox)


class CountingSession(DeskSession):
    async def call(self, call: ToolCall) -> ToolResult:
        self.tried += 1
        return ToolResult(call_id=call.call_id, content=str(self.tried))


def test_the_same_call_with_another_result_is_no_repetition() -> None:
    """Who waits for a build asks again and again."""
    engine = ScriptedEngine(lambda prompt: say("", ("echo", "hi")))
    trajectory = attempt(engine, env=Counting(), max_repeated_calls=2, max_turns=5)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 5)


@pytest.mark.parametrize("tool", ["crash", "flaky"])
def test_tools_that_fail_turn_after_turn_end_it(tool: str) -> None:
    good, bad = say("", ("echo", "hi")), say("", ("echo", "hi"), (tool, "99"))
    trajectory = attempt(ScriptedEngine([bad, good, bad, bad]), max_tool_errors=2, max_repeated_calls=9, tool_retries=1)
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.reward) == (StopReason.TOOL_ERROR, 4, 0.0)
    assert trajectory.stop_reason.is_truncated, "nothing that the policy did"
    assert "Traceback (most recent call last)" in str(trajectory.error)


def test_calls_that_are_wrong_are_no_tool_errors() -> None:
    wrong = iter(range(100))
    engine = ScriptedEngine(lambda prompt: say("", (f"ecco{next(wrong)}", "x"), ("wait", "x")))
    trajectory = attempt(engine, max_tool_errors=1, max_turns=2, tool_timeout_s=0.1)
    assert trajectory.stop_reason is StopReason.MAX_TURNS


LETTERS = Letters()
PRICES = PricesConfig(input=1000, cached_input=100, output=2000)


def test_the_cost_budget_is_never_exceeded() -> None:
    """The third call would cost too much before it says a word; its prompt joins no stream."""
    asked = ToolCall(call_id="", name="echo", arguments={"text": "x"})
    turn = LETTERS.turn_ids(Message(role="assistant", tool_calls=(asked,)))
    free = attempt(ScriptedEngine([turn] * 3), renderer=LETTERS, max_turns=3, prices=PRICES)
    assert (free.stop_reason, len(free.turns)) == (StopReason.MAX_TURNS, 3)
    for budget in (free.cost_usd, free.cost_usd * 0.99, free.cost_usd * 0.5):
        trajectory = attempt(
            ScriptedEngine([turn] * 3), renderer=LETTERS, max_turns=3, prices=PRICES, max_cost_usd=budget
        )
        assert trajectory.cost_usd <= budget * (1 + 1e-12)
        if budget == free.cost_usd:
            assert trajectory.stop_reason is StopReason.MAX_TURNS, "what it costs is enough"
        else:
            assert trajectory.stop_reason is StopReason.COST_BUDGET
            assert trajectory.stop_reason.is_truncated


def test_a_call_whose_input_cannot_be_paid_is_not_made() -> None:
    engine = ScriptedEngine([])
    trajectory = attempt(engine, renderer=LETTERS, prices=PRICES, max_cost_usd=0.001)
    assert (trajectory.stop_reason, engine.prompts, trajectory.streams) == (StopReason.COST_BUDGET, [], ())


@given(
    context=st.integers(0, 200),
    sampled=st.integers(0, 200),
    prompt=st.integers(1, 200),
    repeated=st.integers(0, 200),
    budget=st.one_of(st.none(), st.floats(0.0001, 1.0)),
)
def test_no_limit_is_ever_exceeded(
    context: int, sampled: int, prompt: int, repeated: int, budget: float | None
) -> None:
    limits = LimitsConfig(max_turn_tokens=50, max_trajectory_tokens=150, max_cost_usd=budget)
    so_far = TokenCount(calls=1, input=100, fresh=100, output=sampled)
    next_call = TokenCount(calls=1, input=prompt, fresh=prompt - min(prompt, repeated))
    room = allowance(limits, PRICES, so_far=so_far, next_call=next_call, max_context_tokens=context)
    if room.tokens < 1:
        return
    assert prompt + room.tokens <= context
    assert sampled + room.tokens <= 150
    assert room.tokens <= 50
    if budget is not None:
        assert cost_usd(so_far + next_call + TokenCount(output=room.tokens), PRICES) <= budget + 2e-9


def thinks(text: str) -> list[int]:
    return [*map(ord, f"(thinking {text}"), END]


def test_a_turn_that_ends_amid_its_thinking_is_no_empty_answer() -> None:
    """Nothing can answer it: it has no call and says nothing. It ends the trajectory as a turn that cannot be read, it
    is trained like any other, it is counted, and what is graded does not hold it."""
    trajectory = attempt(ScriptedEngine([thinks("of nothing")]), renderer=LETTERS)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.PARSE_ERRORS, 0.0)
    assert not trajectory.stop_reason.is_truncated
    (turn,) = trajectory.turns
    assert (turn.thinking_open, turn.message.thinking, turn.message.content) == (True, "(thinking of nothing", "")
    row = summarise([trajectory])
    assert (row["turns/thinking_open"], row["answers/empty"], row["stop/final_answer"]) == (1, 0, 0.0)


def test_thinking_that_was_cut_is_a_length_stop_like_any_other() -> None:
    trajectory = attempt(ScriptedEngine([thinks("of nothing")]), renderer=LETTERS, max_turn_tokens=15)
    assert (trajectory.stop_reason, trajectory.turns[0].thinking_open) == (StopReason.TURN_TOKENS, False)


def test_an_empty_answer_is_the_policy_s_own_and_is_counted() -> None:
    trajectory = attempt(ScriptedEngine([[END]]), renderer=LETTERS)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.FINAL_ANSWER, 0.0)
    assert summarise([trajectory])["answers/empty"] == 1


def test_a_call_that_was_whole_when_its_turn_was_cut_is_on_record_and_not_run() -> None:
    asked = LETTERS.turn_ids(Message(role="assistant", tool_calls=(ToolCall(call_id="", name="crash", arguments={}),)))
    turn = [*asked[:-1], *asked]
    trajectory = attempt(ScriptedEngine([turn]), renderer=LETTERS, max_turn_tokens=len(asked) + 3)
    assert trajectory.stop_reason is StopReason.TURN_TOKENS
    assert [call.name for call in trajectory.turns[0].message.tool_calls] == ["crash"]
    assert (trajectory.turns[0].tool_results, trajectory.turns[0].invalid_calls) == ((), 0)


def test_every_reason_is_a_metric_of_its_own() -> None:
    one = attempt(ScriptedEngine([say("ok")]))
    row = summarise(
        [one, one, replace(one, stop_reason=StopReason.WALL_CLOCK), replace(one, stop_reason=StopReason.CANCELLED)]
    )
    assert {name for name in row if name.startswith("stop/")} == {f"stop/{reason.value}" for reason in StopReason}
    shares = {name: value for name, value in row.items() if name.startswith("stop/") and value}
    assert shares == {"stop/final_answer": 0.5, "stop/wall_clock": 0.25, "stop/cancelled": 0.25}
    assert sum(value for name, value in row.items() if name.startswith("stop/")) == 1.0


def test_every_reason_is_truncated_or_infrastructure_or_the_policy_s_own() -> None:
    own = {reason for reason in StopReason if not reason.is_truncated and not reason.is_infrastructure}
    assert own == {
        StopReason.FINAL_ANSWER, StopReason.ENV_DONE, StopReason.PARSE_ERRORS, StopReason.REPEATED_CALL,
    }  # fmt: skip
    assert not any(reason.is_truncated and reason.is_infrastructure for reason in StopReason)


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
