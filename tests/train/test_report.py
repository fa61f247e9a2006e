"""The report of a run: what it says of a whole one, and that a part which is missing is said and not raised."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.rows import write_samples
from rollouts.evaluate import Evaluation
from rollouts.record import write_trajectories
from tests.train.mask_rows import HOSTILE, MODEL, pair, samples
from train.report.evaluations import EvaluationFile, paired_difference, read_evaluation, write_evaluation
from train.report.figures import grpo_figures
from train.report.plots import running_mean, thinned
from train.report.report import choose_pair, headline, render_report, stage_rows
from train.report.run_data import load_run, load_runs, series


def evaluation(name: str, successes: list[int], *, attempts: int = 8, temperature: float = 1.0) -> EvaluationFile:
    """An evaluation with so many successes for each task."""
    success = sum(successes) / len(successes) / attempts
    return EvaluationFile(
        name=name,
        model="runs/model",
        split="heldout",
        temperature=temperature,
        evaluation=Evaluation(
            attempts=attempts,
            tasks=len(successes),
            success=success,
            success_stderr=0.02,
            pass_at_k={1: success, 8: 0.9},
            pass_hat_k={1: success, 8: 0.1},
            counts={f"heldout-0-{i}": (n, attempts) for i, n in enumerate(successes)},
            summary={"turns/mean": 2.5, "tools/calls": 40.0, "tools/errors": 4.0, "trajectories/failed": 0.0},
        ),
    )


def metrics(path: Path, rows: list[dict[str, float]], *, torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn, encoding="utf-8")


def grpo_row(step: int) -> dict[str, float]:
    return {
        "step": step, "reward/mean": 0.4 + 0.01 * step, "length/mean": 50.0, "entropy": 0.3, "grad_norm": 1.0,
        "tokens/trained": 900, "tokens/excluded/dead_group": 100, "groups/dead": 0.25, "stop/final_answer": 1.0,
        "logprob_gap/mean": 1e-6, "logprob_gap/max": 1e-5, "time/rollout_s": 5.0, "time/update_s": 3.0,
        "time/sync_s": 0.2,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A whole quickstart of twelve steps; the last step's tool result is hostile."""
    folder = tmp_path / "quickstart"
    metrics(folder / "sft" / "metrics.jsonl", [{"step": step, "loss": 2.0 / step} for step in range(1, 21)])
    metrics(folder / "grpo" / "metrics.jsonl", [grpo_row(step) for step in range(1, 13)])
    trajectories = pair(tool_text=HOSTILE)
    write_trajectories(folder / "grpo" / "trajectories" / "step-000012.jsonl", trajectories)
    write_samples(folder / "grpo" / "samples" / "step-000012.jsonl", samples(trajectories))
    (folder / "grpo" / "config.toml").write_text('model = "m"\n[grpo]\nmax_steps = 12\n', encoding="utf-8")
    checkpoint = folder / "grpo" / "checkpoints" / "step-000012"
    checkpoint.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, checkpoint / name)
    for name, words, successes in (
        ("grpo", "GRPO model", [8, 6, 7]),
        ("base", "base model", [0, 0, 1]),
        ("sft", "warm start", [4, 3, 4]),
    ):
        write_evaluation(folder / "eval" / f"{name}.json", evaluation(words, successes))
    return folder


def test_the_report_of_a_whole_run(run: Path) -> None:
    data = load_run(run)
    html = render_report([data])
    assert data.notes == ()
    assert headline(data).startswith(
        "Success on held-out tasks rose from 4.2 % (base model) to 45.8 % (warm start) to 87"
    )
    assert "3 held-out tasks, 8 attempts each, temperature 1." in html
    for title in (
        "Loss of the warm start", "Reward", "Length of an attempt", "Entropy", "Sampled tokens: trained or left out",
        "How attempts ended", "Groups without a signal", "Engine against trainer", "Time of a step",
        "An attempt that succeeded", "An attempt at the same task that failed", "grpo/config.toml",
    ):  # fmt: skip
        assert title in html, title


def test_a40_the_report_is_offline_and_hostile_text_stays_text(run: Path) -> None:
    html = render_report([load_run(run)])
    without_pictures = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", html)
    assert html.count("<script>") == 1
    assert "&lt;</span>" in html
    assert "<script>alert" not in html
    assert not re.search(r"https?://|@import|url\(", without_pictures)
    assert len(html) < 1_500_000


def test_stages_are_in_order_and_changes_are_paired(run: Path) -> None:
    rows = stage_rows(load_run(run))
    assert [row.file.name for row in rows] == ["base model", "warm start", "GRPO model"]
    assert rows[0].change == ""
    # 1/8 of a task, three times (4, 3, 3): +41.7 points
    assert rows[1].change == "+41.7 ± 4.2"


def test_evaluations_under_other_conditions_are_not_compared(run: Path) -> None:
    write_evaluation(run / "eval" / "grpo.json", evaluation("GRPO model", [8, 8, 8], temperature=0.5))
    data = load_run(run)
    assert stage_rows(data)[2].change == ""
    assert "cannot be compared" in headline(data)
    assert "The conditions differ between rows" in render_report([data])


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (["sft"], "There is no warm start in this folder."),
        (["grpo"], "There is no GRPO run in this folder."),
        (["eval"], "There is no evaluation yet"),
        (["eval/base.json", "eval/grpo.json"], "There is one evaluation only"),
        (["grpo/checkpoints"], "Loss masks are left out: there is no checkpoint yet"),
        (["grpo/samples"], "Loss masks of attempts are left out"),
        (["grpo/metrics.jsonl"], "There is no finished GRPO step yet."),
        (["grpo/trajectories", "grpo/config.toml"], None),
    ],
)
def test_what_is_missing_is_said(run: Path, gone: list[str], said: str | None) -> None:
    for name in gone:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    html = render_report([load_run(run)])
    assert said is None or said in html


def test_a_killed_run_has_a_report(run: Path) -> None:
    metrics(run / "grpo" / "metrics.jsonl", [grpo_row(step) for step in range(1, 6)], torn='{"step": 6, "rew')
    (run / "eval" / "grpo.json").write_text('{"name": "GR', encoding="utf-8")
    (run / "grpo" / "samples" / "step-000012.jsonl").write_text('{"trajectory_id": 1}\n', encoding="utf-8")
    data = load_run(run)
    html = render_report([data])
    assert len(data.grpo) == 5
    assert "GRPO has finished 5 of 12 steps" in html
    assert "An evaluation was left out" in html
    assert "Some loss masks are left out" in html


def test_a_step_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    metrics(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 1.0}, {"step": 1, "loss": 2.0}])
    assert series(load_run(tmp_path).sft, "loss") == ([1, 2], [2.0, 1.0])


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.5}\n', encoding="utf-8")
    assert series(load_run(tmp_path).sft, "loss") == ([2], [1.5])
    render_report([load_run(tmp_path)])


def test_a_single_step_and_an_empty_step_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    metrics(tmp_path / "metrics.jsonl", [{"step": 1, "reward/mean": 0.0, "groups/dead": 1.0, "tokens/trained": 0}])
    assert {figure.title for figure in grpo_figures([load_run(tmp_path)])} >= {"Reward", "Groups without a signal"}


def test_runs_are_compared(run: Path) -> None:
    other = run.parent / "other" / "quickstart"
    shutil.copytree(run, other)
    runs = load_runs([run, other])
    assert runs[0].name != runs[1].name
    html = render_report(runs)
    assert "Sampled tokens: trained or left out: " in html
    assert "Loss masks are shown in the report of a single run." in html


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is it a run folder"):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such run folder"):
        load_run(tmp_path / "nothing")


def test_a_success_and_a_failure_of_one_task_are_chosen() -> None:
    rows = samples(pair())
    good, bad = choose_pair(rows, {})
    assert "succeeded" in good[0]
    assert good[1] == rows[0]
    assert "failed" in bad[0]
    assert bad[1] == rows[1]


def test_evaluation_files_come_back(tmp_path: Path) -> None:
    written = evaluation("warm start", [1, 2])
    write_evaluation(tmp_path / "eval" / "sft.json", written)
    assert read_evaluation(tmp_path / "eval" / "sft.json") == written
    (tmp_path / "bad.json").write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.json: not an evaluation: model: Field required"):
        read_evaluation(tmp_path / "bad.json")


def test_a_paired_difference_needs_common_tasks() -> None:
    before, after = evaluation("a", [2, 4]).evaluation, evaluation("b", [6, 8]).evaluation
    assert paired_difference(before, after) == (0.5, 0.0, 2)
    assert paired_difference(before, evaluation("c", [1]).evaluation) is None


def test_pictures_are_thinned_and_smoothed() -> None:
    assert thinned([1.0, 3.0, 5.0, 7.0], most=2) == [2.0, 6.0]
    assert len(thinned([0.0] * 10_000)) == 400
    assert running_mean([0.0, 3.0, 6.0], window=3) == [1.5, 3.0, 4.5]


def test_reports_are_made_without_torch() -> None:
    code = "import sys, train.report.report, train.report.terminal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=MODEL.parents[1], check=False).returncode == 0
