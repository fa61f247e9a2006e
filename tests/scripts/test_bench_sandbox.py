"""The sandbox benchmarks give whole results and right counts. How fast anything is, no test asserts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.sandbox.base import Sandbox
from envs.types import ExecResult
from scripts.bench_sandbox import sandbox
from scripts.bench_soak import Options, plan_faults, soak
from scripts.bench_soak_faults import KINDS, Work, WrongError, kind_of
from scripts.bench_soak_leftovers import Place, left, names_of, peak_memory_bytes
from scripts.bench_timing import Started, command_latency, many_at_once, start_latency, summary
from tests.requirements import require

SMALL_IMAGE = "agentgrad-sandbox:1"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def last_line(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("name", ["learning", "sandbox", "soak"])
def test_help_shows_an_example(name: str) -> None:
    done = run("-m", "scripts.bench", name, "--help")
    assert done.returncode == 0
    assert f"example: python -m scripts.bench {name}" in done.stdout
    assert name in run("-m", "scripts.bench", "--help").stdout


def test_a_missing_peer_is_one_line() -> None:
    # Where SWE-ReX is installed too: an entry of None hides it.
    code = (
        "import sys; sys.modules['swerex'] = None; sys.argv = ['bench', 'sandbox']\n"
        "from scripts.bench import main; from scripts.console import run_main; run_main(main)"
    )
    done = run("-c", code)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the peer SWE-ReX is not installed: .venv/bin/pip install -e '.[bench]'")
    assert len(done.stderr.splitlines()) == 1


def test_bubblewrap_alone() -> None:
    require("bwrap")
    result = sandbox(backends=["bubblewrap"], commands=5, starts=2, burst=3)
    assert result["passed"]
    for rows in result["commands"].values():
        assert rows["ours_bubblewrap"]["n"] == rows["ours_bubblewrap_shell"]["n"] == 5
        assert rows["docker_exec"] is rows["swe_rex_execute"] is rows["swe_rex_session"] is None
    assert result["start"]["warm"]["ours_bubblewrap"]["n"] == result["start"]["cold"]["ours_bubblewrap"]["n"] == 2
    assert result["burst"]["ours_bubblewrap"]["right"] == result["burst"]["ours_bubblewrap_warm"]["right"] == 3
    assert result["targets_met"]["true_p50_ours_docker_to_docker_exec"] is None
    assert result["swe_rex"] is None


@pytest.mark.docker
@pytest.mark.slow
def test_docker_with_its_peer() -> None:
    require("docker")
    done = run(
        *("-m", "scripts.bench", "sandbox", "--backends", "docker", "--image", SMALL_IMAGE, "--without-swe-rex"),
        *("--commands", "5", "--starts", "2", "--burst", "3"),
    )
    assert done.returncode == 0, done.stderr
    result = last_line(done.stdout)
    assert result["commands"]["echo"]["docker_exec"] == result["commands"]["echo"]["docker_exec"] | {"n": 5, "wrong": 0}
    assert result["commands"]["echo"]["swe_rex_execute"] is None
    assert result["burst"]["ours_docker"]["right"] == result["burst"]["docker_exec"]["right"] == 3
    assert result["targets_met"]["true_p50_ours_docker_to_docker_exec"] in (True, False)
    assert result["targets_met"]["true_p50_ours_docker_to_swe_rex_execute"] is None


def test_figures_of_known_answers() -> None:
    """Wrong answers are counted, by whom they came."""

    async def right(argv: object) -> str:
        return "x\n"

    async def wrong(argv: object) -> str:
        return "y\n"

    async def stop() -> None:
        return None

    async def start() -> Started:
        return Started(run=wrong, stop=stop)

    async def measure() -> tuple[Any, Any, Any]:
        rows = await command_latency({"right": right, "wrong": wrong}, ["echo", "x"], "x", 4)
        starts, stops = await start_latency({"one": start}, 3, stop)
        assert starts["one"]["n"] == stops["one"]["n"] == 3
        return rows["right"]["wrong"], rows["wrong"]["wrong"], await many_at_once(start, 2, 3)

    of_right, of_wrong, at_once = asyncio.run(measure())
    assert (of_right, of_wrong) == (0, 5)  # also the round that is not timed
    assert (at_once["sandboxes"], at_once["commands"], at_once["right"]) == (2, 6, 0)
    assert summary([0.004]) == {"p50_ms": 4.0, "p95_ms": 4.0, "n": 1}


# --- soak ---


@pytest.mark.slow
def test_a_small_soak_leaves_nothing() -> None:
    require("bwrap")
    done = run("-m", "scripts.bench", "soak", "--trajectories", "12", "--faults", "--backend", "bubblewrap")
    result = last_line(done.stdout)
    assert done.returncode == 0, (result, done.stderr)
    assert result["all_accounted_for"]
    assert (result["leftovers"], result["wrong"], result["hung"], result["owners_crashed"]) == (0, 0, 0, 0)
    assert result["expected"] + result["sandbox_error"] + result["lost_with_owner"] == 12
    assert result["expected"] > 0
    assert sum(result["faults"].values()) == 3
    assert "| all | 12 |" in done.stdout


def test_without_faults_everything_is_as_expected() -> None:
    require("bwrap")
    result = soak(trajectories=4, backend="bubblewrap", owners=2)
    assert result["passed"]
    assert (result["expected"], result["faults"], result["docker_daemon"]) == (4, {}, None)


class Liar:
    """A sandbox whose commands all say the same."""

    async def exec(self, command: object, **options: object) -> ExecResult:
        return ExecResult(exit_code=0, stdout="fine\n", stderr="")

    async def kill_all(self) -> int:
        return 0

    async def reset(self) -> None:
        return None

    async def write_file(self, path: str, content: bytes) -> None:
        return None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fails"])
def test_a_wrong_result_is_found(kind: str) -> None:
    liar: Any = Liar()
    box: Sandbox = liar
    with pytest.raises(WrongError):
        asyncio.run(_do(kind, Work(sandbox=box, mark="mark", random=random.Random(0))))


async def _do(kind: str, work: Work) -> None:
    await KINDS[kind][0](work)


def test_plans_are_the_same_for_the_same_seed() -> None:
    options = Options(
        trajectories=1000,
        faults=True,
        backends=("docker",),
        image=SMALL_IMAGE,
        concurrency=32,
        owners=4,
        seed=0,
        daemon_restarts=True,
    )
    plan = plan_faults(options, own_daemon=True)
    assert plan == plan_faults(options, own_daemon=True)
    assert plan == sorted(plan)
    assert {action for _, action in plan} >= {"owner_sigkill", "owner_sigterm", "pool_sigkill", "daemon_sigkill"}
    assert not [action for _, action in plan_faults(options, own_daemon=False) if action.startswith("daemon")]
    assert [kind_of(number, 0, True) for number in range(len(KINDS))] == list(KINDS)
    assert {kind_of(number, 0, False) for number in range(20)} == {"plain"}


def test_what_is_left_is_found(tmp_path: Path) -> None:
    token = "soak-test-token-of-its-own"
    place = Place(token=token, temporary=tmp_path, docker_host=None, own_daemon=None)
    before = names_of(place)
    process = subprocess.Popen(["sleep", "60"], env=os.environ | {"AGENTGRAD_SOAK": token})
    try:
        (tmp_path / "agentgrad-left").touch()
        found = left(before, names_of(place))
        assert found["processes"] == [f"{process.pid} sleep 60"]
        assert found["temporary_folders"] == [str(tmp_path / "agentgrad-left")]
        assert found["mounts"] == []
        assert peak_memory_bytes(process.pid) > 0
    finally:
        process.kill()
        process.wait()
    assert left(before, names_of(place))["processes"] == []
    assert peak_memory_bytes(process.pid) == 0
