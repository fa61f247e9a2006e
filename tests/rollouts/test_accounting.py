"""How many tokens do rollouts take, and what do they cost? The textbooks' figures, the law, the engine's own count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.types import Completion, SamplingParams, Segment, Source, TokenStream
from envs.types import Message, ToolCall
from rollouts.accounting import (
    TokenCount,
    affordable_tokens,
    check_prices,
    context_growth,
    cost_usd,
    count_tokens,
    count_turns,
)
from rollouts.config import LimitsConfig, PricesConfig
from rollouts.engine_scripted import ScriptedEngine
from rollouts.summary import summarise
from rollouts.types import StopReason, Trajectory, Turn
from tests.rollouts.desk import attempt, make_runner
from tests.rollouts.letters import Letters

PRICES = PricesConfig(input=3, cached_input=0.30, output=15)
LETTERS = Letters()


def even_turns(*, base: int, output: int, result: int, calls: int, engine_cached: int | None = None) -> list[Turn]:
    """Calls that each add the same number of tokens."""
    step = output + result
    return [
        Turn(
            index=index,
            message=Message(role="assistant"),
            tool_results=(),
            generate_s=0.0,
            env_s=0.0,
            prompt_tokens=base + index * step,
            repeated_prompt_tokens=base + (index - 1) * step if index else 0,
            cached_prompt_tokens=engine_cached,
            sampled_tokens=output,
        )
        for index in range(calls)
    ]


def test_the_textbook_s_six_steps_cost_0_0468_dollars_and_0_0198_with_a_prefix_cache() -> None:
    count = count_turns(even_turns(base=1200, output=80, result=320, calls=6))
    assert (count.input, count.fresh, count.cached, count.output) == (13_200, 3_200, 10_000, 480)
    assert round(cost_usd(count, PRICES, prefix_cache=False), 10) == 0.0468
    assert round(cost_usd(count, PRICES), 10) == 0.0198


def test_the_textbook_s_ten_steps_bill_56000_tokens_of_which_9200_in_the_last_call() -> None:
    turns = even_turns(base=2000, output=300, result=500, calls=10)
    assert count_turns(turns).input == context_growth(base=2000, step=800, calls=10) == 56_000
    assert turns[-1].prompt_tokens == 9_200


@given(base=st.integers(0, 5000), output=st.integers(0, 500), result=st.integers(0, 500), calls=st.integers(1, 30))
def test_the_law_of_context_growth_is_the_sum_of_the_contexts(base: int, output: int, result: int, calls: int) -> None:
    """And what is fresh is the last context, once."""
    count = count_turns(even_turns(base=base, output=output, result=result, calls=calls))
    assert count.input == context_growth(base=base, step=output + result, calls=calls)
    assert count.fresh == base + (calls - 1) * (output + result)


def test_the_textbook_s_coding_agent_trains_260_of_2960_tokens() -> None:
    stream = TokenStream()
    sizes = ((300, 120), (1500, 80), (900, 60))
    for index, (context, sampled) in enumerate(sizes):
        source = Source.TOOL if index else Source.PROMPT
        stream.append(Segment(source=source, token_ids=(1,) * context))
        stream.append(Segment.sampled(completion(f"g/0/{index}", sampled)))
    before = (300, 300 + 120 + 1500, 300 + 120 + 1500 + 80 + 900)
    turns = tuple(
        replace(turn, prompt_tokens=prompt, sampled_tokens=sampled)
        for turn, prompt, (_, sampled) in zip(
            even_turns(base=0, output=0, result=0, calls=3), before, sizes, strict=True
        )
    )
    trajectory = Trajectory(
        trajectory_id="g/0",
        task_id="t",
        group_id="g",
        sibling_index=0,
        streams=(stream,),
        turns=turns,
        stop_reason=StopReason.FINAL_ANSWER,
        reward=1.0,
    )
    count = count_tokens([trajectory])
    assert (count.output, count.trained_over) == (260, 2960)
    assert round(100 * count.trained_share, 1) == 8.8
    assert summarise([trajectory])["tokens/trained_share"] == 260 / 2960


def completion(completion_id: str, n: int) -> Completion:
    return Completion(
        completion_id=completion_id,
        token_ids=(2,) * n,
        logprobs=(-1.0,) * n,
        finish_reason="stop",
        policy="p",
        policy_version=(0,) * n,
    )


def call(text: str) -> list[int]:
    """A turn that calls `echo`."""
    asked = ToolCall(call_id="", name="echo", arguments={"text": text})
    return list(LETTERS.turn_ids(Message(role="assistant", tool_calls=(asked,))))


class BlockCacheEngine(ScriptedEngine):
    """An engine that caches all that it read and wrote, in blocks of 16."""

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        known = self.prompts[-1] if self.prompts else ()
        done = await super().generate(completion_id, prompt_ids, params)
        before = len(known) + (self.wrote if known else 0)
        self.wrote = len(done.token_ids)
        return replace(done, cached_prompt_tokens=before // 16 * 16)

    wrote = 0


def test_a_trajectory_of_even_turns_obeys_the_law_and_both_counts_stand_side_by_side() -> None:
    """Every turn is 40 tokens or so, and its observation has the same length: B and d can be read off."""
    asked = call("x" * 20)
    engine = BlockCacheEngine([asked] * 4)
    trajectory = attempt(engine, renderer=LETTERS, max_turns=4, max_repeated_calls=9, prices=PRICES)
    base = len(engine.prompts[0])
    step = len(engine.prompts[1]) - base
    count = count_tokens([trajectory])
    assert count.input == context_growth(base=base, step=step, calls=4) == sum(map(len, engine.prompts))
    assert count.fresh == len(engine.prompts[3])
    assert count.output == 4 * len(asked)
    assert count.engine_cached == sum((base + i * step + len(asked)) // 16 * 16 for i in range(3))
    row = summarise([trajectory])
    assert row["tokens/input"] == row["tokens/input_fresh"] + row["tokens/input_cached"] == count.input
    assert row["tokens/engine_input_cached"] == count.engine_cached
    assert row["tokens/engine_input_fresh"] == count.input - count.engine_cached
    assert row["cost/usd"] == trajectory.cost_usd == cost_usd(count, PRICES) > 0


def test_what_the_engine_does_not_say_is_not_made_up() -> None:
    row = summarise([attempt(ScriptedEngine([call("x")] * 2), renderer=LETTERS, max_turns=2)])
    assert not any(name.startswith("tokens/engine") for name in row)
    known = TokenCount(engine_cached=5)
    assert (known + TokenCount(engine_cached=None)).engine_cached is None
    assert (known + known).engine_cached == 10


def test_what_lost_attempts_took_is_counted_and_paid() -> None:
    kept = attempt(ScriptedEngine([call("x")]), renderer=LETTERS, max_turns=1, prices=PRICES)
    lost = attempt(ScriptedEngine([call("x"), []], fail_calls=[1]), renderer=LETTERS, prices=PRICES)
    row, both = summarise([kept]), summarise([kept], lost=[lost])
    assert lost.stop_reason is StopReason.ENGINE_ERROR
    assert (both["trajectories"], both["trajectories/lost_attempts"]) == (1, 1)
    assert both["tokens/output"] == 2 * row["tokens/output"]
    assert count_tokens([lost]).calls == 2  # what failed had been asked
    assert both["cost/usd"] == row["cost/usd"] + lost.cost_usd > 2 * row["cost/usd"]
    assert both["reward/mean"] == row["reward/mean"]


@pytest.mark.parametrize(
    ("left_usd", "tokens"), [(0.0036, 0), (0.0036 + 15e-6, 1), (0.0036 + 1500e-6, 100), (0.0035, 0), (-1.0, 0)]
)
def test_what_is_left_pays_the_input_first(left_usd: float, tokens: int) -> None:
    """1,200 fresh tokens at $3 a million are $0.0036."""
    assert affordable_tokens(left_usd, TokenCount(calls=1, input=1200, fresh=1200), PRICES) == tokens


def test_output_that_costs_nothing_is_not_bounded() -> None:
    prices = PricesConfig(input=3)
    assert affordable_tokens(0.0036, TokenCount(calls=1, input=1200, fresh=1200), prices) is None
    assert affordable_tokens(0.0035, TokenCount(calls=1, input=1200, fresh=1200), prices) == 0


def test_without_a_price_of_its_own_cached_input_costs_as_any_other() -> None:
    count = TokenCount(calls=2, input=300, fresh=100, output=10)
    prices = PricesConfig(input=1, output=2)
    assert cost_usd(count, prices) == cost_usd(count, prices, prefix_cache=False) == pytest.approx(320e-6)


def test_a_budget_that_nothing_could_use_up_is_refused_at_start_up() -> None:
    limits = LimitsConfig(max_cost_usd=0.5)
    with pytest.raises(ValueError, match=r"^rollout.limits.max_cost_usd is 0.5, but all of rollout.prices are 0"):
        check_prices(limits, PricesConfig())
    check_prices(limits, PricesConfig(output=1))
    check_prices(LimitsConfig(), PricesConfig())
    with pytest.raises(ValueError, match="max_cost_usd"):
        make_runner(ScriptedEngine([]), None, max_cost_usd=0.5)  # type: ignore[arg-type]
