"""The command that shows loss masks: what it finds by itself, and what it says when it cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.rows import write_samples
from data.types import Excluded, Source
from rollouts.record import Record, write_trajectories
from rollouts.types import StopReason
from tests.train.mask_rows import HOSTILE, MODEL, pair, samples, trajectory
from train.report.masks import KIND_WORDS, MaskView, totals
from train.report.sources import file_kind, find_model, load_views

ROOT = MODEL.parents[1]


def view_masks(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.view_masks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trajectories = pair(tool_text=HOSTILE)
    write_trajectories(tmp_path / "trajectories" / "step-000004.jsonl", trajectories)
    write_samples(tmp_path / "samples" / "step-000004.jsonl", samples(trajectories))
    for step in (2, 4):
        checkpoint = tmp_path / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        shutil.copy(MODEL / "tokenizer.json", checkpoint / "tokenizer.json")
    return tmp_path


@pytest.fixture
def demonstrations(tmp_path: Path) -> Path:
    call = {"type": "function", "id": "1", "function": {"name": "lookup", "arguments": '{"key": "age of Oslo"}'}}
    messages = [
        {"role": "user", "content": "How old is Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "train": False},
        {"role": "tool", "content": HOSTILE, "tool_call_id": "1"},
        {"role": "assistant", "content": "The answer is 12."},
    ]
    path = tmp_path / "data" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    return path


def test_packed_samples_in_the_terminal(run: Path) -> None:
    done = view_masks(run / "samples" / "step-000004.jsonl", "--limit", "1")
    assert done.returncode == 0, done.stderr
    assert "«The answer is 14.⟦<|im_end|>⟧»" in done.stdout
    assert "reward 1; ended by final answer" in done.stdout
    assert "1 of 2 rows are shown" in done.stdout


def test_a_page_of_trajectories(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "masks.html"
    done = view_masks(run / "trajectories" / "step-000004.jsonl", "--html", page)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 rows" in done.stdout
    assert "without the configuration of a GRPO run beside them" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("masked", [True, False])
def test_trajectories_have_the_mask_of_their_run(run: Path, masked: bool) -> None:
    path = run / "trajectories" / "step-000004.jsonl"
    cut = trajectory(1, reward=0.0, stop_reason=StopReason.MAX_TURNS)
    write_trajectories(path, [trajectory(0), cut])
    (run / "config.toml").write_text(f"[grpo]\nmask_truncated_completions = {str(masked).lower()}\n")
    _, view = load_views(path, MODEL, limit=2).views
    assert totals([view]).excluded == ({Excluded.TRUNCATED: totals([view]).by_source[Source.MODEL]} if masked else {})
    assert "the mask is the one that the trainer would make" in KIND_WORDS[view.kind]


def test_files_put_one_behind_the_other_are_shown_one_behind_the_other(run: Path) -> None:
    """Two evaluations of one name have the same ids: none is taken for the other."""
    path = run / "both.jsonl"
    for name, model in (("a", MODEL), ("b", run / "checkpoints" / "step-000004")):
        with Record(run / name, {"model": str(model)}) as record:
            for one in pair():
                record.append(one)
    path.write_bytes((run / "a").read_bytes() + (run / "b").read_bytes())
    loaded = load_views(path, None, limit=8)
    assert (loaded.rows, len(loaded.views)) == (4, 4)


def test_a_last_line_that_is_cut_off_is_said(run: Path) -> None:
    path = run / "trajectories" / "step-000004.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    done = view_masks(path)
    assert done.returncode == 0, done.stderr
    assert "the last line is cut off (" in done.stderr
    assert "«The answer is 14." in done.stdout
    assert "«The answer is 13." not in done.stdout


def test_a_header_alone_says_that_there_are_no_trajectories(run: Path) -> None:
    path = run / "trajectories" / "step-000004.jsonl"
    write_trajectories(path, [])
    with pytest.raises(ValueError, match=r"step-000004\.jsonl: there are no trajectories in it"):
        load_views(path, MODEL, limit=8)


def test_demonstrations_of_a_warm_start(demonstrations: Path) -> None:
    loaded = load_views(demonstrations, MODEL, limit=5)
    assert loaded.kind == "demonstrations"
    (view,) = loaded.views
    trained = "".join(part.text for token in view.tokens if token.trained for part in token.text)
    assert trained == "The answer is 12.<|im_end|>"
    assert any("kept as context only" in token.why for token in view.tokens)


def test_a_demonstration_that_is_dropped_says_so(demonstrations: Path) -> None:
    row = json.loads(demonstrations.read_text(encoding="utf-8"))
    row["messages"][-1]["content"] = "<tool_call>{}</tool_call>"
    demonstrations.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (view,) = load_views(demonstrations, MODEL, limit=1).views
    assert view.facts["left out of the warm start"].startswith("with a control token as text")


def test_a_demonstration_without_tokens_says_why_and_the_rest_is_shown(demonstrations: Path, tmp_path: Path) -> None:
    whole = demonstrations.read_text(encoding="utf-8")
    demonstrations.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' + whole, encoding="utf-8")
    done = view_masks(demonstrations, "--model", MODEL)
    assert done.returncode == 0, done.stderr
    assert "left out of the warm start without a trained turn" in done.stdout
    assert "«The answer is 12.⟦<|im_end|>⟧»" in done.stdout
    done = view_masks(demonstrations, "--model", MODEL, "--html", tmp_path / "m.html")
    assert done.returncode == 0, done.stderr


def spelled(view: MaskView) -> str:
    return "".join(part.text for token in view.tokens for part in token.text)


@pytest.mark.parametrize("section", ["renderer", "rollout.renderer"])
@pytest.mark.parametrize("place", ["final", "checkpoints/step-000002"])
def test_demonstrations_are_written_as_the_run_of_the_model_did(
    demonstrations: Path, tmp_path: Path, place: str, section: str
) -> None:
    model = tmp_path / place
    shutil.copytree(MODEL, model)
    before = load_views(demonstrations, model, limit=1)
    (tmp_path / "config.toml").write_text(f'[{section}]\ntool_format = "react"\n', encoding="utf-8")
    after = load_views(demonstrations, model, limit=1)
    named = load_views(demonstrations, MODEL, limit=1, config=tmp_path / "config.toml")
    assert "Action: lookup" not in spelled(before.views[0])
    assert "Action: lookup" in spelled(after.views[0])
    assert spelled(named.views[0]) == spelled(after.views[0])
    assert str(tmp_path / "config.toml") in str(after.written_by)
    assert "settings: defaults" in str(before.written_by)


def test_a_configuration_that_cannot_be_meant_is_refused(run: Path, demonstrations: Path) -> None:
    config = run / "other.toml"
    config.write_text('[renderer]\ntool_format = "cobol"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.toml: renderer\.tool_format: "):
        load_views(demonstrations, MODEL, limit=1, config=config)
    with pytest.raises(ValueError, match="holds tokens"):
        load_views(run / "samples" / "step-000004.jsonl", MODEL, limit=1, config=config)


def test_the_kind_of_a_file_is_told_by_content(run: Path, demonstrations: Path) -> None:
    assert file_kind(run / "samples" / "step-000004.jsonl") == "samples"
    assert file_kind(run / "trajectories" / "step-000004.jsonl") == "trajectories"
    assert file_kind(demonstrations) == "demonstrations"


def test_the_newest_checkpoint_is_found(run: Path) -> None:
    assert find_model(run / "samples" / "step-000004.jsonl").name == "step-000004"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "the file is empty"),
        ("<html>\n", "not a JSONL file"),
        ('{"step": 1}\n', "rows must be packed samples"),
        ('{"loss_mask": [true]}\n', "line 1: trajectory_id: Field required"),
    ],
)
def test_bad_input_is_one_line(run: Path, content: str | None, said: str) -> None:
    path = run / "samples" / "broken.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    done = view_masks(path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_run_folder_it_asks_for_the_model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    alone = tmp_path_factory.mktemp("alone") / "a" / "b" / "c" / "dump.jsonl"
    alone.parent.mkdir(parents=True)
    shutil.copy(run / "samples" / "step-000004.jsonl", alone)
    done = view_masks(alone)
    assert done.returncode == 2
    assert "--model FOLDER" in done.stderr
    assert view_masks(alone, "--model", MODEL).returncode == 0
    assert "no tokenizer.json" in view_masks(alone, "--model", run).stderr
