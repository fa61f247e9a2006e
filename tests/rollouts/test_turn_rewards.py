"""An environment that pays for turns: from its grade to the advantage of each token, or refused as a whole."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.gate import check_batch
from data.ledger import Ledger
from data.types import Excluded, Source
from envs.base import Grade
from envs.sandbox.base import Sandbox
from envs.types import Message, Task
from rollouts.config import LimitsConfig, PricesConfig, SamplingConfig
from rollouts.engine import RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.record import read_trajectories, write_trajectories
from rollouts.replay import Replay
from rollouts.reward import read_reward
from rollouts.samples import group_samples
from rollouts.summary import summarise
from rollouts.synthesize import synthesize
from rollouts.types import StopReason, Trajectory, TrajectoryGroup
from rollouts.validate import check_task
from tests.rollouts.desk import TASK, Desk, DeskSession, check_record, in_sandboxes, make_runner
from tests.rollouts.letters import Letters
from tests.rollouts.test_streams import thought
from train.advantages import step_advantages
from train.config import GrpoConfig

PLAIN = GrpoConfig(scale_rewards="none")
DROPS = Letters(drops_thinking=True)


class PaidDesk(Desk):
    """Pays 0.5 at the end of a turn for each "gold" that the echo said, and takes 0.25 for each "mud"; the outcome is
    the desk's. `examples`: turns that the conversation is opened with, which the policy did not take."""

    def __init__(self, examples: int = 0) -> None:
        self.examples = examples

    def opening(self, task: Task) -> list[Message]:
        example = [Message(role="user", content="Say hi."), Message(role="assistant", content="hi")]
        return [*example * self.examples, *super().opening(task)]

    def session(self, task: Task, sandbox: Sandbox) -> PaidSession:
        return PaidSession(task, sandbox, skip=len(self.opening(task)))


class PaidSession(DeskSession):
    """One attempt at it."""

    def __init__(self, task: Task, sandbox: Sandbox, *, skip: int) -> None:
        super().__init__(task, sandbox)
        self._skip = skip

    async def grade(self, messages: Sequence[Message]) -> Any:
        outcome = await super().grade(messages)
        assert isinstance(outcome, Mapping)
        turn, paid = -1, dict[int, float]()
        for message in messages[self._skip :]:
            turn += message.role == "assistant"
            if message.role == "tool" and message.content in ("gold", "mud"):
                paid[turn] = paid.get(turn, 0.0) + (0.5 if message.content == "gold" else -0.25)
        return Grade(terms=outcome, turn_rewards=paid)


def sampled(script: Sequence[Sequence[int]], *, index: int, ledger: Ledger, env: Desk, **limits: Any) -> Trajectory:
    engine = ScriptedEngine(script)
    own = Ledger()
    trajectory = in_sandboxes(
        lambda sandboxes: make_runner(RecordingEngine(engine, own), sandboxes, env=env, renderer=DROPS, **limits).run(
            TASK, group_id="g", sibling_index=index
        )
    )
    check_record(trajectory, own, engine)
    for completion in own:
        ledger.record(completion)
    return trajectory


def test_from_the_environment_to_each_token_c33(tmp_path: Path) -> None:
    """Two siblings; the first thinks, so that its turns lie in several streams, and its third turn is paid twice."""
    ledger, env = Ledger(), PaidDesk(examples=2)
    rich = [thought("hm", "", "mud"), thought("", "", "x"), thought("hm", "", "gold", "gold"), thought("", "ok")]
    poor = [thought("", "", "x"), thought("", "no")]
    siblings = [sampled(script, index=i, ledger=ledger, env=env) for i, script in enumerate([rich, poor])]
    write_trajectories(tmp_path / "t.jsonl", siblings)
    assert list(read_trajectories(tmp_path / "t.jsonl")) == siblings

    first, second = siblings
    assert first.turn_rewards == (-0.25, 0.0, 1.0, 0.0)
    assert first.reward_terms == {"ok": 1.0, "turn_rewards": 0.75}
    assert first.reward == 1.75
    assert (second.turn_rewards, second.reward_terms, second.reward) == ((), {"ok": 0.0}, 0.0)
    assert summarise(siblings)["reward/turn_rewards"] == 0.375
    assert [turn.stream for turn in first.turns] == [0, 1, 1, 2]

    # Returns 1.75, 2, 2, 1 against 0, each from half way between them.
    advantages = step_advantages(siblings, PLAIN)
    assert advantages == {"g/0": (0.875, 1.0, 1.0, 0.5), "g/1": (-0.875, -1.0)}
    group = TrajectoryGroup(group_id="g", task=TASK, trajectories=(first, second))
    samples = group_samples(group, advantages, mask_truncated=True)
    check_batch(samples, ledger)
    found: dict[str, set[float]] = {}
    for sample in samples:
        for place, source in enumerate(sample.source):
            if source is Source.MODEL:
                found.setdefault(sample.completion_ids[sample.completion_index[place]], set()).add(
                    sample.advantages[place]
                )
            else:
                assert sample.advantages[place] == 0.0
    assert found == {
        "g/0/0": {0.875}, "g/0/1": {1.0}, "g/0/2": {1.0}, "g/0/3": {0.5}, "g/1/0": {-0.875}, "g/1/1": {-1.0},
    }  # fmt: skip


def test_a_turn_that_was_cut_has_its_place() -> None:
    """The answer ran into a limit, so it is no part of the conversation; its turn is there, and earned nothing."""
    script = [thought("", "", "gold"), thought("", "a long story")]
    limit = len(script[0])
    cut = sampled(
        [script[0], [*map(ord, "x" * limit)]], index=0, ledger=Ledger(), env=PaidDesk(), max_turn_tokens=limit
    )
    assert cut.stop_reason is StopReason.TURN_TOKENS
    assert (cut.turn_rewards, cut.reward) == ((0.5, 0.0), 0.5)
    other = sampled([thought("", "no")], index=1, ledger=Ledger(), env=PaidDesk())
    config = GrpoConfig(scale_rewards="none", truncation_penalty=-0.25, mask_truncated_completions=False)
    assert step_advantages([cut, other], config) == {"g/0": (0.125, -0.125), "g/1": (-0.125,)}


def test_a_replay_pays_what_was_paid() -> None:
    rich = sampled([thought("hm", "", "gold"), thought("", "ok")], index=0, ledger=Ledger(), env=PaidDesk())
    again = Replay(
        renderer=DROPS,
        limits=LimitsConfig(max_turn_tokens=1000, max_trajectory_tokens=4000, wall_clock_s=30.0),
        sampling=SamplingConfig(),
        prices=PricesConfig(),
        max_context_tokens=8000,
    )
    replayed = asyncio.run(again.run(rich))
    assert rich.turn_rewards == (0.5, 0.0)
    assert (replayed.turn_rewards, replayed.reward_terms, replayed.reward) == ((0.5, 0.0), rich.reward_terms, 1.5)


@pytest.mark.parametrize(
    ("paid", "says"),
    [
        ({2: 1.0}, "a reward for turn 2; this trajectory has turns 0 to 1"),
        ({-1: 1.0}, "a reward for turn -1; this trajectory has turns 0 to 1"),
        ({True: 1.0}, "a reward for turn True;"),
        ({"turn1": -0.25, "turn2": 1.0}, "a reward for turn 'turn1';"),
        ({1.0: 1.0}, "a reward for turn 1.0;"),
        ({0: math.nan}, "turn 0 the reward nan"),
        ({0: 1.0, 1: -math.inf}, "turn 1 the reward -inf"),
        ({0: None}, "turn 0 the reward None"),
        ({0: True}, "turn 0 the reward True"),
        ({0: "1"}, "turn 0 the reward '1'"),
        ({0: 1e308, 1: 1e308}, "reward terms whose sum is not finite"),
    ],
)
def test_what_is_not_clear_is_refused_as_a_whole_c33(paid: Any, says: str) -> None:
    """Nothing of it counts: the trajectory has no reward, is in no baseline, and is counted."""

    class Unclear(PaidSession):
        async def grade(self, messages: Sequence[Message]) -> Any:
            return Grade(terms={"ok": 1.0}, turn_rewards=paid)

    class UnclearDesk(PaidDesk):
        def session(self, task: Task, sandbox: Sandbox) -> PaidSession:
            return Unclear(task, sandbox, skip=1)

    script = [thought("", "", "gold"), thought("", "ok")]
    refused = sampled(script, index=0, ledger=Ledger(), env=UnclearDesk())
    assert (refused.stop_reason, refused.reward) == (StopReason.FINAL_ANSWER, None)
    assert (dict(refused.reward_terms), refused.turn_rewards) == ({}, ())
    assert says in str(refused.error)
    good = [sampled([thought("", said)], index=i, ledger=Ledger(), env=Desk()) for i, said in ((1, "ok"), (2, "no"))]
    assert step_advantages([refused, *good], PLAIN) == {"g/1": (0.5,), "g/2": (-0.5,)}
    assert summarise([refused, *good])["rewards/excluded"] == 1
    group = TrajectoryGroup(group_id="g", task=TASK, trajectories=(refused, *good))
    samples = group_samples(group, step_advantages(group.trajectories, PLAIN), mask_truncated=True)
    assert set(samples[0].excluded) == {None, Excluded.INFRASTRUCTURE}


@pytest.mark.parametrize(
    ("grade", "says"),
    [
        ({0: -0.25, 1: 1.0}, "the name 0; names are text, and what turns earned goes into Grade.turn_rewards"),
        ({"turn_rewards": 1.0}, "that name is kept"),
        (Grade(terms={"turn_rewards": 1.0}, turn_rewards={0: 1.0}), "that name is kept"),
        (Grade(terms={"ok": math.nan}, turn_rewards={0: 1.0}), "the reward term ok = nan"),
    ],
)
def test_turns_are_not_paid_by_a_term_c33(grade: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_reward(grade, turns=2)


def test_shapes_that_are_none_are_faults() -> None:
    for grade in (None, Grade(terms=[1.0]), Grade(turn_rewards=[0.5, 1.0])):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="mapping"):
            read_reward(grade, turns=2)  # type: ignore[arg-type]


def test_what_was_paid_is_summed() -> None:
    paid = read_reward(Grade(turn_rewards={np.int64(1): np.float32(0.5)}), turns=2)  # type: ignore[dict-item]
    assert (paid.total, paid.terms, paid.turn_rewards) == (0.5, {"turn_rewards": 0.5}, (0.0, 0.5))
    assert read_reward(Grade(terms={"ok": 1.0}), turns=2) == read_reward({"ok": 1.0}, turns=2)
    assert read_reward(Grade(), turns=2).total is None
    assert read_reward(Grade(turn_rewards={0: 0.0}), turns=1).turn_rewards == (0.0,)
    with pytest.raises(ValueError, match=r"this trajectory has no turn"):
        read_reward(Grade(turn_rewards={0: 0.0}), turns=0)


def test_one_reward_for_each_turn_or_none() -> None:
    """A record that was changed by hand is not trained with."""
    rich = sampled([thought("", "", "gold"), thought("", "ok")], index=0, ledger=Ledger(), env=PaidDesk())
    fields = {name: getattr(rich, name) for name in Trajectory.__dataclass_fields__}
    with pytest.raises(ValueError, match="1 rewards of turns, but 2 turns"):
        Trajectory(**fields | {"turn_rewards": (0.5,)})


@pytest.mark.parametrize("turn", [0, 1])
def test_demonstrations_and_checks_of_tasks_know_turns_too(turn: int) -> None:
    """The demonstrator says ok in its only turn, after an opening that has a turn of its own."""

    class Pays(PaidSession):
        async def grade(self, messages: Sequence[Message]) -> Any:
            done = 0.5 * (messages[-1].content == "ok")
            return Grade(terms={"ok": done}, turn_rewards={turn: done})

    class PaysDesk(PaidDesk):
        def session(self, task: Task, sandbox: Sandbox) -> PaidSession:
            return Pays(task, sandbox, skip=0)

    env = PaysDesk(examples=1)
    tasks = env.tasks("train", 2, 0)

    async def demonstrate(sandboxes: Any) -> int:
        made = await synthesize(env, sandboxes, tasks, seed=0, max_turns=2, max_concurrent=1, tool_timeout_s=5.0)
        return len(made.demonstrations)

    async def check(sandboxes: Any) -> str | None:
        return (await check_task(env, sandboxes, tasks[0], timeout_s=5.0)).problem

    if turn == 0:
        assert (in_sandboxes(demonstrate), in_sandboxes(check)) == (2, None)
        return
    for work in (demonstrate, check):
        with pytest.raises(ValueError, match="a reward for turn 1; this trajectory has turns 0 to 0"):
            in_sandboxes(work)
