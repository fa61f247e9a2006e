"""The ids of a stream are those that were sampled, however odd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from data.types import Completion, SamplingParams, Source
from rollouts.engine_scripted import ScriptedEngine
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


class OwnStopEngine(ScriptedEngine):
    """It ends at an end-of-text token of its own, as servers do, and calls that a stop."""

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        own = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
        wider = SamplingParams(max_tokens=params.max_tokens, stop_token_ids=(*params.stop_token_ids, own))
        return await super().generate(completion_id, prompt_ids, wider)


def test_the_next_prompt_closes_every_turn_once_a36() -> None:
    """With the stop token sampled, with another one, and (cut) with none."""
    end_of_text = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    asked = say("", ("echo", "hi"))
    for turn in (asked, [*asked[:-1], end_of_text]):
        engine = OwnStopEngine([turn, say("ok")])
        trajectory = attempt(engine)
        following = engine.prompts[1][len(engine.prompts[0]) + len(turn) :]
        assert list(trajectory.streams[0].token_ids)[: len(engine.prompts[1])] == list(engine.prompts[1])
        assert (turn[-1] == STOP) != (following[0] == STOP), "the turn is closed once"
        assert trajectory.reward == 1.0
    cut = attempt(ScriptedEngine([asked]), max_turn_tokens=3)
    (segment,) = [s for s in cut.streams[0] if s.source is Source.MODEL]
    assert (list(segment.token_ids), len(segment.logprobs)) == (asked[:3], 3)
