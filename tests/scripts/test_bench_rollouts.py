"""The rollouts benchmark: its arithmetic, its plan, and contenders that do the plan's work. No test asserts a speed."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from data.template_renderer import TemplateRenderer
from envs.types import ToolCall
from rollouts.engine import EngineError
from rollouts.engine_scripted import ScriptedEngine
from rollouts.record import read_trajectories
from scripts.bench_rollouts import summarise
from scripts.bench_rollouts_engine import Script, Timeline, busy
from scripts.bench_rollouts_own import own_cost, sample
from scripts.bench_rollouts_plan import Facts, Plan, PlannedEnv, calls_of, latencies_s, make_plan
from scripts.bench_rollouts_trl import TrlPeer
from tests.requirements import require

MODEL = Path(__file__).parents[2] / "models" / "embedded"
RENDERER = TemplateRenderer(AutoTokenizer.from_pretrained(MODEL), name="embedded")
PLAN = make_plan(RENDERER, trajectories=5, seed=0)


def scripted(plan: Plan, env: PlannedEnv) -> ScriptedEngine:
    """It refuses every prompt that is not the plan's, token for token."""
    return ScriptedEngine(dict(calls_of(plan, RENDERER, env).values()))


# --- busy ---


def test_all_that_is_ready_runs() -> None:
    timeline = Timeline(joined=[0.0, 0.0], left=[(2.0, True), (3.0, True)])
    assert busy(timeline, began=0.0, trajectories=2, limit=2) == 1.0


def test_waiting_for_a_tool_is_not_ready() -> None:
    timeline = Timeline(joined=[0.0, 5.0], left=[(1.0, False), (6.0, True)], returned=[5.0])
    assert busy(timeline, began=0.0, trajectories=1, limit=4) == 1.0


def test_waiting_for_others_is_ready() -> None:
    """Two of one turn each, one call; the second one's tool is back at 1, and it goes on at 3 with the first one's."""
    timeline = Timeline(
        joined=[0.0, 0.0, 3.0, 3.0],
        left=[(1.0, False), (1.0, False), (4.0, True), (4.0, True)],
        returned=[1.0, 3.0],
    )
    # Ran: two for two seconds. Ready: both while they ran, and one of them from 1 to 3.
    assert busy(timeline, began=0.0, trajectories=2, limit=2) == pytest.approx(4 / 6)


def test_a_free_place_counts_while_trajectories_wait_to_begin() -> None:
    """One place, two trajectories: the second may begin at 1 and does at 2."""
    timeline = Timeline(joined=[0.0, 2.0], left=[(1.0, True), (3.0, True)])
    assert busy(timeline, began=0.0, trajectories=2, limit=1) == pytest.approx(2 / 3)


def test_no_more_are_ready_than_places() -> None:
    timeline = Timeline(joined=[0.0, 0.0], left=[(1.0, True), (1.0, True)])
    assert busy(timeline, began=-1.0, trajectories=3, limit=2) == pytest.approx(2 / 4)


def test_medians_and_rates() -> None:
    runs = [{"contender": "a", "seconds": s, "busy": 0.9, "cached_prompt_tokens": None} for s in (4.0, 2.0, 9.0)]
    runs.append({"contender": "b", "seconds": 1.0, "busy": 0.1, "cached_prompt_tokens": None})
    row = summarise(runs, "a", {"trajectories": 8, "sampled_tokens": 100})
    assert (row["seconds"], row["busy"], row["trajectories_per_s"], row["sampled_tokens_per_s"]) == (
        4.0,
        0.9,
        2.0,
        25.0,
    )


# --- the script of the engine ---


def update(
    added: Sequence[tuple[int, int, list[int]]] = (), removed: Sequence[int] = (), moved: Sequence[Any] = ()
) -> Any:
    """A change of the batch as vLLM tells it; `added`: row, seed, and the list that what is sampled will be put in."""
    new = [(row, SimpleNamespace(seed=seed), None, sampled) for row, seed, sampled in added]
    return SimpleNamespace(added=new, removed=removed, moved=moved)


def test_each_row_says_its_own_script() -> None:
    timeline = Timeline()
    script = Script({7: ((4, 2), False), 8: ((5, 6, 2), True)}, timeline)
    first: list[int] = []
    second: list[int] = []
    script.update_state(update(added=[(0, 7, first), (1, 8, second)]))
    said = script.apply(torch.zeros(2, 9))
    assert said.argmax(dim=1).tolist() == [4, 5]
    assert said.isfinite().sum().item() == 2
    first.append(4)
    second.append(5)
    script.update_state(update(moved=[(0, 1, SimpleNamespace(name="SWAP"))]))
    assert script.apply(torch.zeros(2, 9)).argmax(dim=1).tolist() == [6, 2]
    assert [ended for _, ended in timeline.left] == [False]
    second.append(6)
    script.update_state(update(removed=[1]))
    assert script.apply(torch.zeros(1, 9)).argmax(dim=1).tolist() == [2]
    assert [ended for _, ended in timeline.left] == [False, True]
    assert len(timeline.joined) == 2


def test_a_row_that_moves_into_a_gap_keeps_its_script() -> None:
    script = Script({7: ((4, 2), False), 8: ((5, 6, 2), True)}, Timeline())
    script.update_state(update(added=[(0, 7, []), (1, 8, [5])]))
    script.update_state(update(removed=[0], moved=[(1, 0, SimpleNamespace(name="UNIDIRECTIONAL"))]))
    script.update_state(None)
    assert script.apply(torch.zeros(1, 9)).argmax(dim=1).tolist() == [6]


# --- the plan ---


def test_latencies_are_those_that_are_asked_for() -> None:
    waits = latencies_s(1000)
    assert waits == sorted(waits)
    assert statistics.median(waits) == pytest.approx(0.05, rel=0.01)
    assert sum(wait > 2.0 for wait in waits) == 10


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    assert make_plan(RENDERER, trajectories=5, seed=0) == PLAN
    assert make_plan(RENDERER, trajectories=5, seed=1) != PLAN


def test_turns_of_a_plan() -> None:
    plan = make_plan(RENDERER, trajectories=40, seed=3)
    assert {len(turns) for turns in plan.turns.values()} == {3, 4, 5, 6}
    for turns in plan.turns.values():
        assert turns[-1].key is None
        for turn in turns[:-1]:
            (call,) = RENDERER.parse(turn.token_ids, call_id_prefix="c").calls
            assert isinstance(call, ToolCall)
            assert call.arguments == {"key": turn.key}
    assert len(plan.facts) == len(plan.latency_s) == plan.num_turns - 40


# --- the contenders ---


def test_ours_carries_the_plan_out(tmp_path: Path) -> None:
    env = PlannedEnv(PLAN, Facts(PLAN, wait=False))
    done = asyncio.run(sample(PLAN.tasks, scripted(PLAN, env), RENDERER, env, tmp_path / "t.jsonl", 2))
    assert sum(len(trajectory.turns) for trajectory in done) == PLAN.num_turns
    assert len(list(read_trajectories(tmp_path / "t.jsonl"))) == len(PLAN.tasks)


def test_a_trajectory_that_ends_otherwise_is_an_error(tmp_path: Path) -> None:
    env = PlannedEnv(PLAN, Facts(PLAN, wait=False))
    engine = ScriptedEngine(dict(calls_of(PLAN, RENDERER, env).values()), fail_calls=range(100))
    with pytest.raises(RuntimeError):
        asyncio.run(sample(PLAN.tasks, engine, RENDERER, env, tmp_path / "t.jsonl", 2))


def test_own_cost_has_its_parts() -> None:
    cost = own_cost(PLAN, RENDERER, limit=2)
    assert cost["turns"] == PLAN.num_turns
    assert len(cost["runs"]) == 3
    assert min(cost["runs"]) > 0
    assert {"ledger.record", "record", "renderer.bridge", "renderer.opening", "rest"} <= cost[
        "breakdown_ms_per_turn"
    ].keys()


@pytest.mark.parametrize("at_once", [False, True])
def test_trl_carries_the_plan_out(tmp_path: Path, at_once: bool) -> None:
    """The engine refuses every prompt but those that our renderer writes, so TRL's loop writes the same ids."""
    facts = Facts(PLAN, wait=False)
    peer = TrlPeer(MODEL, PLAN, facts, limit=2, at_once=at_once, folder=tmp_path)
    engine = scripted(PLAN, PlannedEnv(PLAN, facts))
    asyncio.run(peer.run(engine, PLAN.tasks))
    assert len(engine.prompts) == PLAN.num_turns


def test_trl_with_other_results_is_an_error(tmp_path: Path) -> None:
    facts = Facts(PLAN, wait=False)
    peer = TrlPeer(MODEL, PLAN, facts, limit=2, at_once=False, folder=tmp_path)
    final = PLAN.turns[PLAN.tasks[0].task_id][-1].token_ids
    with pytest.raises(EngineError, match="TRL's sampled tokens of record-0000"):
        asyncio.run(peer.run(ScriptedEngine(lambda prompt: final), PLAN.tasks))


def test_help_shows_an_example() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "rollouts", "--help"], capture_output=True, text=True, timeout=300
    )
    assert "example: python -m scripts.bench rollouts" in done.stdout


@pytest.mark.parametrize("repeats", ["1", "3"])
def test_a_quick_run_takes_no_number_of_repeats(repeats: str) -> None:
    command = [sys.executable, "-m", "scripts.bench", "rollouts", "--model", "none", "--quick", "--repeats", repeats]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "argument --repeats: not allowed with argument --quick" in done.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_a_small_run_with_vllm() -> None:
    """In a process of its own: TRL wants to be there before vLLM's process group."""
    require("vllm")
    code = (
        "import json; from pathlib import Path; from scripts.bench_rollouts import rollouts\n"
        f"print(json.dumps(rollouts(model=Path({str(MODEL)!r}), trajectories=6, limit=3, repeats=1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["work"]["trajectories"] == 6
    assert 0 < result["contenders"]["trl"]["busy"] <= 1
    assert 0 < result["contenders"]["ours"]["busy"] <= 1
    assert [run["contender"] for run in result["runs"]] == ["ours", "trl", "trl_at_once"]
