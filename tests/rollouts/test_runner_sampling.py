"""How is each completion sampled? Every setting reaches the engine; what could have no effect is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from data.types import Completion, SamplingParams
from envs.base import Env
from rollouts.config import SamplingConfig
from rollouts.engine_scripted import ScriptedEngine
from tests.rollouts.desk import Desk, attempt, make_runner
from tests.rollouts.letters import END, Letters


class ParamsEngine(ScriptedEngine):
    """It remembers how it was asked to sample."""

    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        super().__init__(script)
        self.params: list[SamplingParams] = []

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.params.append(params)
        return await super().generate(completion_id, prompt_ids, params)


def test_every_sampling_setting_reaches_the_engine() -> None:
    sampling = SamplingConfig(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, constrain_calls=True,
    )  # fmt: skip
    engine = ParamsEngine([[END]])
    attempt(engine, renderer=Letters(grammar="{}"), sampling=sampling, max_turn_tokens=7)
    (params,) = engine.params
    settings = sampling.model_dump(exclude={"constrain_calls"})
    assert {name: getattr(params, name) for name in settings} == settings
    assert (params.structural_tag, params.max_tokens, params.stop_token_ids) == ("{}", 7, (END,))


class NoTools(Desk):
    tools = ()


@pytest.mark.parametrize(("env", "refused"), [(Desk(), True), (NoTools(), False)])
def test_calls_that_no_grammar_can_hold_are_refused_at_start_up(env: Env, refused: bool) -> None:
    sampling = SamplingConfig(constrain_calls=True)
    if not refused:
        assert attempt(ScriptedEngine([[END]]), renderer=Letters(), env=env, sampling=sampling).error is None
        return
    with pytest.raises(ValueError, match=r"^rollout.sampling.constrain_calls: the model's tool format has no grammar"):
        make_runner(ScriptedEngine([]), None, renderer=Letters(), env=env, sampling=sampling)  # type: ignore[arg-type]
