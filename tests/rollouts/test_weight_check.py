"""The probe after a sync finds an engine that does not have the trainer's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollouts.engine import SyncReport
from rollouts.engine_scripted import ScriptedEngine
from rollouts.engine_transformers import TransformersEngine, score_tokens
from rollouts.engine_vllm import VllmEngine
from rollouts.engine_vllm_start import VllmOptions
from rollouts.weight_check import WeightCheck, WeightSyncError, check_pushed, check_weights
from tests.requirements import require
from tests.rollouts.tiny_llama import make_llama, save_llama, some_prompt

PROBES = [some_prompt(i, 24) for i in range(3)]
TOLERANCE = 1e-3


def check(
    engine_says: Sequence[float], trainer_says: Sequence[float], previous: WeightCheck | None = None
) -> WeightCheck:
    engine = ScriptedEngine([], logprobs=lambda ids: engine_says, policy_version=7)
    return asyncio.run(check_weights(engine, lambda ids: trainer_says, [[1, 2, 3]], 0.01, previous))


def test_case_c09_a_sync_after_an_update_must_bring_something_new() -> None:
    def report(tensors: int, changed: int | None) -> SyncReport:
        return SyncReport(tensors=tensors, changed=changed, caches_dropped=1, requests_running=0)

    check_pushed(report(20, None), is_updated=True)  # the first one
    check_pushed(report(20, 1), is_updated=True)
    check_pushed(report(20, 0), is_updated=False)  # such as a learning rate that starts at 0
    with pytest.raises(WeightSyncError, match="none of the 20 tensors that were synced has changed"):
        check_pushed(report(20, 0), is_updated=True)
    with pytest.raises(WeightSyncError, match="none of the 0 tensors"):
        check_pushed(report(0, None), is_updated=False)


def test_two_sides_that_agree_pass() -> None:
    result = check([-1.0, -2.0], [-1.005, -2.0])
    assert result.largest_difference == pytest.approx(0.005)
    assert result.largest_change is None
    assert result.policy_version == 7


def test_the_message_names_the_difference_the_place_and_likely_causes() -> None:
    with pytest.raises(WeightSyncError, match=r"1\.1 nats .* token 2 of probe 0 .* version 7.*tied head"):
        check([-1.0, -3.1], [-1.0, -2.0])


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_score_that_is_no_number_fails(broken: float) -> None:
    with pytest.raises(WeightSyncError, match="inf"):
        check([broken, -2.0], [-1.0, -2.0])


def test_an_engine_that_stood_still_while_the_trainer_moved_fails_inside_the_tolerance() -> None:
    first = check([-1.0, -2.0], [-1.0, -2.0])
    with pytest.raises(WeightSyncError, match="did not arrive"):
        check([-1.0, -2.0], [-1.004, -2.0], first)
    assert check([-1.003, -2.0], [-1.004, -2.0], first).largest_change == pytest.approx(0.003)


def test_small_moves_that_the_engine_does_not_follow_add_up() -> None:
    first = check([-1.0, -2.0], [-1.0, -2.0])
    second = check([-1.0, -2.0], [-1.0006, -2.0], first)
    with pytest.raises(WeightSyncError, match=r"changed by 0.0012 nats since version 7.*did not arrive"):
        check([-1.0, -2.0], [-1.0012, -2.0], second)


def test_a_step_that_changed_nothing_passes() -> None:
    first = check([-1.0, -2.0], [-1.0, -2.0])
    assert check([-1.0, -2.0], [-1.0, -2.0], first).largest_change == 0


def test_probes_must_be_there_and_stay_the_same() -> None:
    with pytest.raises(ValueError, match="at least one probe"):
        asyncio.run(check_weights(ScriptedEngine([]), lambda ids: [], [], 0.01))
    first = check([-1.0, -2.0], [-1.0, -2.0])
    with pytest.raises(ValueError, match="same probes"):
        check([-1.0], [-1.0], first)


def test_a_real_sync_passes_and_a_forgotten_one_fails(tmp_path: Path) -> None:
    engine = TransformersEngine(save_llama(tmp_path, seed=0))
    old, new = make_llama(0), make_llama(1)

    async def sync() -> WeightCheck:
        first = await check_weights(engine, lambda ids: score_tokens(old, ids), PROBES, TOLERANCE)
        with pytest.raises(WeightSyncError, match="differ by"):
            await check_weights(engine, lambda ids: score_tokens(new, ids), PROBES, TOLERANCE, first)
        await engine.load_weights(new.state_dict(), 1)
        second = await check_weights(engine, lambda ids: score_tokens(new, ids), PROBES, TOLERANCE, first)
        await engine.close()
        return second

    result = asyncio.run(sync())
    assert result.largest_change is not None
    assert result.largest_change > 0.1


@pytest.mark.vllm
def test_a_stale_tied_head_in_vllm_is_found(tmp_path: Path) -> None:
    """vLLM's own reload keeps the packed copy of a tied head when `lm_head.weight` is not sent, and says nothing."""
    require("vllm")
    engine = VllmEngine(save_llama(tmp_path, seed=0), options=VllmOptions(kv_cache_gib=0.0625))
    old, new = make_llama(0), make_llama(1)
    parameters = {name: parameter.detach() for name, parameter in new.named_parameters()}
    assert "lm_head.weight" not in parameters

    async def sync() -> None:
        await check_weights(engine, lambda ids: score_tokens(old, ids), PROBES, TOLERANCE)
        await engine.run(
            lambda llm: llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(parameters.items())})
        )
        with pytest.raises(WeightSyncError, match="tied head"):
            await check_weights(engine, lambda ids: score_tokens(new, ids), PROBES, TOLERANCE)
        await engine.load_weights(parameters, 1)
        await check_weights(engine, lambda ids: score_tokens(new, ids), PROBES, TOLERANCE)
        await engine.close()

    asyncio.run(sync())
