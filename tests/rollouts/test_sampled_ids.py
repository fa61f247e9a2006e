"""The ids of a stream are those that were sampled, however odd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from data.types import Completion, FinishReason, SamplingParams, Source
from rollouts.engine_scripted import ScriptedEngine
from rollouts.types import StopReason
from tests.rollouts.desk import (
    STOP,
    TOKENIZER,
    attempt,
    say,
)


def split_into_letters(text: str) -> list[int]:
    """A split that the tokenizer would not make: letter by letter."""
    ids = [token for letter in text for token in TOKENIZER.encode(letter, add_special_tokens=False)]
    assert ids != TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def test_an_unusual_split_is_kept_bit_for_bit_a06() -> None:
    first = [*split_into_letters("the population"), *say("", ("echo", "hi"))]
    last = [*split_into_letters("the population"), STOP]
    engine = ScriptedEngine([first, last])
    trajectory = attempt(engine)
    sampled = [list(s.token_ids) for s in trajectory.streams[0] if s.source is Source.MODEL]
    assert sampled == [first, last]
    assert list(engine.prompts[1][: len(engine.prompts[0]) + len(first)]) == [*engine.prompts[0], *first]


@pytest.mark.parametrize("stray", ["<|im_start|>", "<|endoftext|>", "</tool_response>"])
def test_a_stray_control_token_stays_and_shifts_nothing_a37(stray: str) -> None:
    first = [TOKENIZER.convert_tokens_to_ids(stray), *say("", ("echo", "hi"))]
    plain, strayed = attempt(ScriptedEngine([first[1:], say("ok")])), attempt(ScriptedEngine([first, say("ok")]))
    segments = list(zip(plain.streams[0], strayed.streams[0], strict=True))
    assert [a.token_ids == b.token_ids for a, b in segments] == [i != 1 for i in range(len(segments))]
    assert list(segments[1][1].token_ids) == first
    assert strayed.reward == 1.0


class EndingEngine(ScriptedEngine):
    """It gives the answers as they are, and says `finish_reason` of each: what a server with stop tokens, stop strings
    or a context of its own does."""

    def __init__(self, answers: Sequence[Sequence[int]], finish_reason: FinishReason) -> None:
        super().__init__(answers)
        self._answers = iter(answers)
        self._finish_reason: FinishReason = finish_reason

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.prompts.append(tuple(prompt_ids))
        answer = tuple(next(self._answers))
        return Completion(
            completion_id=completion_id,
            token_ids=answer,
            logprobs=(-1.0,) * len(answer),
            finish_reason=self._finish_reason,
            policy="p",
            policy_version=(0,) * len(answer),
        )


def test_the_next_prompt_holds_a_turn_and_its_stop_token_once_a36() -> None:
    asked = say("", ("echo", "hi"))
    engine = ScriptedEngine([asked, say("ok")])
    trajectory = attempt(engine)
    following = engine.prompts[1][len(engine.prompts[0]) :]
    assert list(following[: len(asked)]) == asked
    assert following[len(asked)] != STOP, "the turn is closed once"
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("ending", "finish_reason", "why"),
    [
        ([TOKENIZER.convert_tokens_to_ids("<|endoftext|>")], "stop", "not one of the stop tokens"),
        ([], "stop", "not one of the stop tokens"),
        ([], "length", "and ended by its length, 1000 were asked for"),
    ],
    ids=["a stop token of its own", "a stop string", "a context of its own"],
)
def test_an_engine_that_ends_turns_by_rules_of_its_own_a36(
    ending: list[int], finish_reason: FinishReason, why: str
) -> None:
    """What was sampled is on record and accounted for (`attempt` compares it with the ledger), and is never trained:
    the policy would have gone on."""
    turn = [*say("", ("echo", "hi"))[:-1], *ending]
    trajectory = attempt(EndingEngine([turn], finish_reason))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ENGINE_ERROR, None)
    assert why in str(trajectory.error)
    assert [turn.sampled_tokens for turn in trajectory.turns] == [len(turn)]


def test_a_turn_that_was_cut_is_kept_as_it_is_a36() -> None:
    cut = attempt(ScriptedEngine([say("", ("echo", "hi"))]), max_turn_tokens=3)
    segments = list(cut.streams[0])
    assert (list(segments[-1].token_ids), len(segments[-1].logprobs)) == (say("", ("echo", "hi"))[:3], 3)


@pytest.mark.parametrize("logprobs", [[], [-1.0] * 1000], ids=["fewer", "more"])
def test_a_completion_with_as_many_logprobs_as_it_likes_is_the_engine_s_fault_a36(logprobs: list[float]) -> None:
    trajectory = attempt(ScriptedEngine([say("ok")], logprobs=lambda answer: logprobs))
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.ENGINE_ERROR, ())
    assert "must have one length" in trajectory.cause
