"""The scripted engine does what the script says."""

from __future__ import annotations

import asyncio
import time

import pytest

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError
from rollouts.engine_scripted import ScriptedEngine

PARAMS = SamplingParams(max_tokens=3, stop_token_ids=(2,))


def answer(engine: ScriptedEngine, prompt: list[int]) -> Completion:
    return asyncio.run(engine.generate("c", prompt, PARAMS))


def test_answers_come_in_order_from_a_table_or_from_a_function() -> None:
    in_order = ScriptedEngine([[5, 2], [6, 2]])
    assert [answer(in_order, [1]).token_ids, answer(in_order, [1]).token_ids] == [(5, 2), (6, 2)]
    assert in_order.prompts == [(1,), (1,)]
    assert answer(ScriptedEngine({(1, 3): [7, 2]}), [1, 3]).token_ids == (7, 2)
    assert answer(ScriptedEngine(lambda prompt: [prompt[0], 2]), [9]).token_ids == (9, 2)


@pytest.mark.parametrize(
    ("script", "expected", "reason"),
    [([4, 2, 8], (4, 2), "stop"), ([4, 5, 6, 2], (4, 5, 6), "length"), ([4, 5, 2], (4, 5, 2), "stop")],
)
def test_an_answer_is_cut_as_a_real_engine_would(script: list[int], expected: tuple[int, ...], reason: str) -> None:
    completion = answer(ScriptedEngine([script]), [1])
    assert (completion.token_ids, completion.finish_reason) == (expected, reason)


def test_an_answer_that_no_engine_would_give_is_refused() -> None:
    with pytest.raises(ValueError, match="neither ends"):
        answer(ScriptedEngine([[4]]), [1])
    with pytest.raises(ValueError, match="has 0 answers"):
        answer(ScriptedEngine([]), [1])


def test_logprobs_are_given_or_constant() -> None:
    assert answer(ScriptedEngine([[5, 2]], logprobs=-0.25), [1]).logprobs == (-0.25, -0.25)
    by_token = ScriptedEngine([[5, 2]], logprobs=lambda ids: [-float(i) for i in ids])
    assert answer(by_token, [1]).logprobs == (-5.0, -2.0)
    assert asyncio.run(by_token.score([1, 4, 3])) == [-4.0, -3.0]


def test_the_call_that_shall_fail_fails() -> None:
    engine = ScriptedEngine(lambda prompt: [2], fail_calls=[1])
    answer(engine, [1])
    with pytest.raises(EngineError, match="call 1"):
        answer(engine, [1])
    answer(engine, [1])


def test_a_sync_during_a_call_does_not_change_its_version() -> None:
    engine = ScriptedEngine(lambda prompt: [2], delay_s=0.05)

    async def sync_meanwhile() -> Completion:
        call = asyncio.create_task(engine.generate("c", [1], PARAMS))
        await asyncio.sleep(0.01)
        await engine.load_weights({}, 1)
        return await call

    started = time.monotonic()
    assert asyncio.run(sync_meanwhile()).policy_version == (0,)
    assert time.monotonic() - started >= 0.05
    assert engine.policy_version == 1
