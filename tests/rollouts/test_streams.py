"""Streams only grow; where a template rewrites what came before, a new one begins, and each sampled token is in one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.gate import check_batch
from data.ledger import Ledger
from data.types import Excluded, Segment, Source, TokenStream
from envs.types import Message, Task, ToolCall
from rollouts.accounting import count_tokens
from rollouts.engine import RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.samples import group_samples
from rollouts.summary import sampled_tokens, summarise
from rollouts.types import StopReason, Trajectory, TrajectoryGroup, Turn, trajectory_name
from tests.by_turn import by_turn
from tests.rollouts.desk import TASK, attempt, check_record, in_sandboxes, make_runner
from tests.rollouts.letters import CLOSE, END, IDS, Letters

KEEPS, DROPS = Letters(), Letters(drops_thinking=True)
no_clock = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


def thought(thinking: str, content: str = "", *texts: str) -> list[int]:
    """A turn: thinking, prose, and calls of `echo`."""
    calls = tuple(ToolCall(call_id="", name="echo", arguments={"text": text}) for text in texts)
    return list(KEEPS.turn_ids(Message(role="assistant", thinking=thinking, content=content, tool_calls=calls)))


def test_a_template_that_drops_thinking_begins_a_new_stream_a07() -> None:
    """The second prompt does not begin as the first one did, so it is a stream of its own, in which the rewritten
    history is context; it is counted."""
    first, second, last = thought("hm, x", "So.", "x"), thought("", "Then.", "y"), thought("at last", "ok")
    engine = ScriptedEngine([first, second, last])
    trajectory = attempt(engine, renderer=DROPS)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.FINAL_ANSWER, 1.0)
    assert [turn.stream for turn in trajectory.turns] == [0, 1, 1], "the second turn did not think"
    assert [turn.message.thinking for turn in trajectory.turns] == ["hm, x", "", "at last"]
    sources = [[segment.source for segment in stream] for stream in trajectory.streams]
    assert sources[0] == [Source.PROMPT, Source.MODEL]
    assert sources[1][:2] == [Source.PROMPT, Source.MODEL]
    assert sources[1][-1] is Source.MODEL
    rewritten = DROPS.decode(trajectory.streams[1].segments[0].token_ids)
    assert rewritten == (
        '[user]Say ok.[end][assistant]So.[call]{"name": "echo", "arguments": {"text": "x"}}[end][tool]x[end][assistant]'
    )
    assert summarise([trajectory])["streams/extra"] == 1
    # What both contexts begin with is not fresh a second time.
    shared = len(DROPS.encode_text("Say ok.")) + 3
    assert trajectory.turns[1].repeated_prompt_tokens == shared
    assert count_tokens([trajectory]).fresh == len(engine.prompts[0]) + len(engine.prompts[2]) - shared


def test_after_a_rewritten_context_only_what_both_begin_with_is_not_fresh() -> None:
    """The second context holds the thinking of the first turn, the third one does not."""
    engine = ScriptedEngine([thought("hm", "So.", "x"), thought("", "Then.", "y"), thought("", "ok")])
    trajectory = attempt(engine, renderer=Letters(drops_thinking=True, late=True))
    assert [turn.stream for turn in trajectory.turns] == [0, 0, 1]
    opening = len(engine.prompts[0])
    assert [turn.repeated_prompt_tokens for turn in trajectory.turns] == [0, opening, opening]
    assert count_tokens([trajectory]).fresh == len(engine.prompts[1]) + len(engine.prompts[2]) - opening


def test_thinking_that_is_kept_needs_one_stream() -> None:
    first, last = thought("hm, x", "So.", "x"), thought("at last", "ok")
    trajectory = attempt(ScriptedEngine([first, last]), renderer=KEEPS)
    assert [turn.stream for turn in trajectory.turns] == [0, 0]
    assert summarise([trajectory])["streams/extra"] == 0
    assert CLOSE in trajectory.streams[0].token_ids


turns = st.lists(
    st.tuples(
        st.sampled_from(["", "hm", "hm " * 20]),
        st.sampled_from(["", "So."]),
        st.lists(st.text("ab<|\n", max_size=9), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@no_clock
@given(
    plan=turns,
    renderer=st.sampled_from([KEEPS, DROPS, Letters(drops_thinking=True, late=True)]),
    room=st.integers(150, 3000),
    budget=st.integers(60, 2000),
)
def test_whatever_is_said_each_sampled_token_is_in_one_stream(
    plan: list[tuple[str, str, list[str]]], renderer: Letters, room: int, budget: int
) -> None:
    """`attempt` compares streams, prompts and ledger; here the samples pass the gate too, wherever a limit ends it."""
    script = [*(thought(thinking, content, *texts) for thinking, content, texts in plan), thought("", "ok")]
    engine = ScriptedEngine(script, max_context_tokens=room)
    ledger = Ledger()
    trajectory = in_sandboxes(
        lambda sandboxes: make_runner(
            RecordingEngine(engine, ledger), sandboxes, renderer=renderer, max_trajectory_tokens=budget
        ).run(TASK, group_id="g", sibling_index=0)
    )
    check_record(trajectory, ledger, engine)
    assert all(len(stream) <= room for stream in trajectory.streams)
    assert all(list(stream)[-1].source is Source.MODEL for stream in trajectory.streams), "no bridge to nowhere"
    group = group_of(trajectory)
    report = check_batch(group_samples(group, by_turn(group, [1.0]), mask_truncated=True), ledger)
    truncated = trajectory.stop_reason.is_truncated
    assert report.trained == (0 if truncated else sampled_tokens(trajectory))
    assert report.excluded[Excluded.TRUNCATED] == (sampled_tokens(trajectory) if truncated else 0)


def group_of(*trajectories: Trajectory, lost: tuple[Trajectory, ...] = ()) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="g", task=Task(task_id="t", prompt=""), trajectories=trajectories, lost=lost)


@pytest.mark.parametrize("drops", [False, True])
def test_a_history_that_fills_the_context_is_not_written(drops: bool) -> None:
    first = thought("hm", "So.", "x" * 50)
    opening = len(KEEPS.opening([Message(role="user", content="Say ok.")], ())[0].token_ids)
    engine = ScriptedEngine([first], max_context_tokens=opening + len(first) + 10)
    trajectory = attempt(engine, renderer=DROPS if drops else KEEPS, max_turn_tokens=len(first))
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert len(trajectory.streams) == 1
    assert trajectory.streams[0].token_ids[-1] == END


def test_what_was_sampled_for_lost_attempts_is_excluded_and_its_ids_are_its_own() -> None:
    """The gate's rule holds for them too: every token of the ledger is trained, or excluded with a reason."""
    ledger = Ledger()

    async def both(sandboxes: object) -> tuple[Trajectory, Trajectory]:
        script = [thought("", "", "x"), [], thought("", "", "x"), thought("", "ok")]
        engine = RecordingEngine(ScriptedEngine(script, fail_calls=[1]), ledger)
        runner = make_runner(engine, sandboxes, renderer=KEEPS)  # type: ignore[arg-type]
        lost = await runner.run(TASK, group_id="g", sibling_index=0)
        return lost, await runner.run(TASK, group_id="g", sibling_index=0, attempt=1)

    lost, again = in_sandboxes(both)
    assert (lost.stop_reason, lost.attempt) == (StopReason.ENGINE_ERROR, 0)
    assert (again.stop_reason, again.attempt, again.trajectory_id) == (StopReason.FINAL_ANSWER, 1, "g/0~1")
    assert [completion.completion_id for completion in ledger] == ["g/0/0", "g/0~1/0", "g/0~1/1"]
    group = group_of(again, lost=(lost,))
    report = check_batch(group_samples(group, by_turn(group, [1.0]), mask_truncated=True), ledger)
    assert report.trained == sampled_tokens(again)
    assert report.excluded[Excluded.INFRASTRUCTURE] == sampled_tokens(lost) > 0


@given(names=st.lists(st.tuples(st.sampled_from(["a", "a/1"]), st.integers(0, 12), st.integers(0, 12)), unique=True))
def test_every_attempt_has_a_name_of_its_own(names: list[tuple[str, int, int]]) -> None:
    assert len({trajectory_name(*name) for name in names}) == len(names)


def test_the_letters_are_what_they_say() -> None:
    """The renderer of these tests reads what it writes."""
    message = Message(
        role="assistant",
        thinking="hm",
        content="So.",
        tool_calls=(ToolCall(call_id="c_0", name="f", arguments={"x": 1}),),
    )
    parsed = KEEPS.parse(KEEPS.turn_ids(message), call_id_prefix="c")
    assert (parsed.thinking, parsed.content, parsed.calls) == ("hm", "So.", message.tool_calls)
    assert set(IDS.values()).isdisjoint(KEEPS.encode_text("[end][call]"))


def test_turns_without_what_was_sampled_are_refused_a27() -> None:
    """A loop of somebody's own that keeps messages alone: it would train nothing, and nobody would know."""
    prompt = TokenStream([Segment(source=Source.PROMPT, token_ids=(1, 2, 3))])
    turn = Turn(index=0, message=Message(role="assistant", content="Hi"), tool_results=(), generate_s=0, env_s=0)
    for streams in ((), (TokenStream(),), (prompt,)):
        trajectory = Trajectory(
            trajectory_id="g/0", task_id="t", group_id="g", sibling_index=0, streams=streams, turns=(turn,),
            stop_reason=StopReason.FINAL_ANSWER, reward=1.0,
        )  # fmt: skip
        for advantages in ({"g/0": []}, {}):
            with pytest.raises(
                ValueError, match=r"^trajectory g/0: 1 turns, but no MODEL segment; a turn needs the token ids"
            ):
                group_samples(group_of(trajectory), advantages, mask_truncated=True)
