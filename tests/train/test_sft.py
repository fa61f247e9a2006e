"""The warm start: which tokens are trained, what is refused before the first step, and that a run goes on after a kill.

Ids in docstrings are those of public faults of other trainers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from data.demonstrations import to_sample, to_samples
from data.template_renderer import TemplateRenderer
from tests.train.sft_child import STEPS, sft
from tests.train.tiny import (
    load_embedded_tokenizer,
    read_rows,
    save_conversations,
    save_model,
    some_conversations,
    tool_conversation,
)
from train.model import load_tokenizer
from train.sft import latest_trainer_checkpoint
from train.sft_data import check_samples, training_order

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model is not faster on more, and much slower where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_embedded_tokenizer()


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerBase) -> TemplateRenderer:
    return TemplateRenderer(tokenizer, name="tiny")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and 24 conversations."""
    folder = tmp_path_factory.mktemp("sft")
    save_model(folder / "model")
    save_conversations(folder / "data.jsonl", some_conversations(24))
    return folder


@pytest.fixture(scope="module")
def finished(home: Path) -> Path:
    """An undisturbed run in one process."""
    sft(home, home / "undisturbed")
    return home / "undisturbed"


def test_a16_the_token_that_sampling_stops_at_is_trained(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer
) -> None:
    """A16: the declared EOS is another token than the template's end of turn."""
    other = load_embedded_tokenizer()
    other.eos_token = "<|endoftext|>"
    stop = TemplateRenderer(other, name="other").stop_token_ids
    assert stop == renderer.stop_token_ids != (other.eos_token_id,)
    save_model(tmp_path / "model", other)
    save_conversations(tmp_path / "data.jsonl", some_conversations(8))
    final = sft(tmp_path, tmp_path / "run", max_steps=1)
    generation = AutoModelForCausalLM.from_pretrained(final).generation_config
    assert generation.eos_token_id == [stop[0], other.eos_token_id]
    sample = to_sample(tool_conversation("tower"), renderer)
    with pytest.raises(ValueError, match=r"ends with '.*', but sampling stops at '<\|endoftext\|>'"):
        check_samples([sample], [other.eos_token_id], tokenizer)


def test_a18_no_step_without_trained_tokens(tmp_path: Path, home: Path) -> None:
    """A18: all answers lie beyond the limit."""
    conversations = [tool_conversation(str(i), question="how? " * 60, answer="12345") for i in range(8)]
    data = save_conversations(tmp_path / "data.jsonl", conversations)
    with pytest.raises(ValueError, match=r"no demonstration is left to train on.*8 longer than 64 tokens"):
        sft(home, tmp_path / "run", data=str(data), max_length=64)
    assert not (tmp_path / "run").exists()


def test_bad_input_is_one_line_before_anything_is_written(tmp_path: Path, home: Path) -> None:
    no_template = load_embedded_tokenizer()
    no_template.chat_template = None
    bare = tmp_path / "bare"
    save_model(bare / "model", no_template)
    shutil.copy(home / "data.jsonl", bare / "data.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"messages": [\n')
    for folder, changes, message in (
        (home, {"data": str(tmp_path / "none.jsonl")}, "none.jsonl: no such file of demonstrations"),
        (home, {"data": str(empty)}, "no demonstration is left"),
        (home, {"data": str(torn)}, "torn.jsonl, line 1: not a conversation"),
        (home, {"per_device_train_batch_size": 25}, "24 rows are fewer than the 25 of one step"),
        (tmp_path, {}, "model: no such folder"),
        (bare, {}, "no chat template"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            sft(folder, tmp_path / "run", **changes)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()


def test_order_is_a_shuffle_of_each_epoch() -> None:
    lengths = [10 + index % 7 for index in range(21)]
    order = training_order(lengths, rows_per_step=4, steps=7, seed=1)
    assert len(order) == 28
    assert len(set(order[:20])) == 20
    assert order == training_order(lengths, rows_per_step=4, steps=9, seed=1)[:28]
    assert order != training_order(lengths, rows_per_step=4, steps=7, seed=2)


def test_a_run_leaves_a_model_and_one_row_a_step(home: Path, finished: Path) -> None:
    rows = read_rows(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    # Linear warm-up over two steps, then a cosine: nothing else touches the learning rate.
    assert rows[0]["learning_rate"] == 0
    assert rows[1]["learning_rate"] == pytest.approx(5e-3)
    assert rows[2]["learning_rate"] == pytest.approx(1e-2)
    renderer = TemplateRenderer(load_tokenizer(str(finished / "final")), name="final")
    samples, _ = to_samples(some_conversations(24), renderer, max_length=1024)
    order = training_order([len(s) for s in samples], rows_per_step=8, steps=STEPS, seed=3)
    for step, row in enumerate(rows):
        mine = [samples[index] for index in order[8 * step : 8 * step + 8]]
        assert row["tokens/trained"] == sum(sum(sample.loss_mask) for sample in mine)
        assert row["tokens/total"] == sum(len(sample) for sample in mine)
    assert {path.name for path in (finished / "final").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert AutoModelForCausalLM.from_pretrained(finished / "final").generation_config.eos_token_id == 3
    assert AutoTokenizer.from_pretrained(finished / "final").chat_template == load_embedded_tokenizer().chat_template


def test_a_finished_run_is_left_alone(home: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    assert sft(home, finished) == finished / "final"
    assert "is there already" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path, home: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "final")
    assert latest_trainer_checkpoint(run / "checkpoints") == (run / "checkpoints" / "checkpoint-8", 8)
    (run / "checkpoints" / "checkpoint-8" / "trainer_state.json").write_text('{"global_step": ')
    assert latest_trainer_checkpoint(run / "checkpoints") == (run / "checkpoints" / "checkpoint-6", 6)
    sft(home, run)
    assert_equal_runs(run, finished)


def test_a_run_killed_before_its_model_was_written(tmp_path: Path, home: Path, finished: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "final").rename(run / ".final.partial")
    sft(home, run)
    assert_equal_runs(run, finished)


def test_accumulation_changes_nothing(tmp_path: Path, home: Path, finished: Path) -> None:
    sft(home, tmp_path / "run", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_equal_runs(tmp_path / "run", finished)


@pytest.mark.slow
def test_killed_in_two_processes_and_started_again(home: Path, finished: Path) -> None:
    """Process 0 dies by SIGKILL at step 6, when its row is written and its checkpoint is not."""
    run = home / "run"
    assert launch(home, kill_at=6) != 0
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert latest_trainer_checkpoint(run / "checkpoints") == (run / "checkpoints" / "checkpoint-4", 4)
    assert not (run / "final").exists()
    assert launch(home, kill_at=0) == 0
    assert_equal_runs(run, finished)


def launch(home: Path, *, kill_at: int) -> int:
    # With --cpu, accelerate launches one process whatever --num_processes says; this form launches as many as asked.
    command = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", "0",
        "-m", "tests.train.sft_child", str(home), str(kill_at),
    ]  # fmt: skip
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=500).returncode


def assert_equal_runs(run: Path, other: Path) -> None:
    """Each step once, the same losses, the same weights."""
    rows, expected = read_rows(run / "metrics.jsonl"), read_rows(other / "metrics.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "tokens/trained", "tokens/total"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3), (row["step"], name)
    weights, wanted_weights = (load_file(folder / "final" / "model.safetensors") for folder in (run, other))
    for name, weight in wanted_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)
