"""The warm start: which tokens are trained, what is refused before the first step, and that a run goes on after a kill.

Ids in docstrings are those of public faults of other trainers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from safetensors.torch import load_file
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from data.chat import TemplateRenderer
from data.demonstrations import Demonstration, to_sample, to_samples
from data.types import TrainingSample
from envs.types import Message, ToolCall
from tests.train.sft_child import STEPS, sft
from tests.train.tiny import (
    TOOL,
    load_embedded_tokenizer,
    read_rows,
    save_conversations,
    save_model,
    some_conversations,
    tool_conversation,
)
from train.config import CheckpointConfig, OptimizerConfig, SftConfig
from train.model import load_tokenizer
from train.sft import latest_trainer_checkpoint, make_trainer, run_sft, sft_arguments
from train.sft_data import IGNORED, check_samples, trained_by_source, training_order

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


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


def trained_text(tokenizer: PreTrainedTokenizerBase, sample: TrainingSample) -> str:
    return tokenizer.decode([t for t, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained])


def trainer_batch(folder: Path, tokenizer: PreTrainedTokenizerBase, samples: list[TrainingSample]) -> dict[str, Any]:
    """What the trainer's own data loader makes of the rows, in one batch."""
    config = SftConfig(data="unused", per_device_train_batch_size=len(samples), max_steps=1)
    arguments = sft_arguments(folder / "checkpoints", 0, config, OptimizerConfig(), CheckpointConfig())
    stop = TemplateRenderer(tokenizer, name="tiny").stop_token_ids[0]
    path = str(save_model(folder / "model", tokenizer))
    trainer = make_trainer(path, tokenizer, stop, samples, arguments, config)
    return next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("template", ["ours", "qwen2_5.jinja", "qwen3.jinja"])
def test_a01_stock_templates_train_all_assistant_tokens(tmp_path: Path, template: str) -> None:
    """A01: templates without a generation block."""
    tokenizer = load_embedded_tokenizer()
    if template != "ours":
        tokenizer.chat_template = (TEMPLATES / template).read_text()
    assert isinstance(tokenizer.chat_template, str)
    assert not re.search(r"{%-?\s*generation", tokenizer.chat_template)
    renderer = TemplateRenderer(tokenizer, name=template)
    conversations = some_conversations(4)
    samples, _ = to_samples(conversations, renderer, max_length=4000)
    turns = [renderer.turn_ids(m) for c in conversations for m in c.messages if m.role == "assistant"]
    assert len(turns) == 8
    labels = trainer_batch(tmp_path, tokenizer, samples)["labels"]
    assert int((labels != IGNORED).sum()) == sum(len(turn) for turn in turns) > 0


def test_a02_user_and_tool_text_is_never_trained(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer
) -> None:
    """A02: sentinels in the tool result and the user turn; the counts by source are in the report."""
    conversation = tool_conversation("tower", question="sentineluser?", tool_text="sentineltool")
    samples, report = to_samples([conversation], renderer, max_length=400)
    labels = trainer_batch(tmp_path, tokenizer, samples)["labels"]
    text = tokenizer.decode(labels[labels != IGNORED])
    assert "It is 12." in text
    assert "sentinel" not in text
    n = report.trained_tokens
    assert trained_by_source(samples) == f"0 prompt, 0 model, 0 tool, 0 template, {n} target"


@pytest.mark.parametrize("opening", ["A", "Yes  "])
def test_a03_an_assistant_turn_first(renderer: TemplateRenderer, opening: str) -> None:
    """A03: a one-character turn at the start, and a turn that ends in two spaces."""
    turn = Message(role="assistant", content=opening)
    sample = to_sample(
        Demonstration(task_id="a03", messages=(turn, Message(role="user", content="and now?")), tools=()), renderer
    )
    trained = tuple(t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m)
    assert trained == renderer.turn_ids(turn)
    assert sample.loss_mask == (False,) * (len(sample) - len(trained)) + (True,) * len(trained)


@pytest.mark.parametrize("place", ["second turn", "tool result", "end of turn"])
def test_a04_rows_are_dropped_and_counted_never_cut(renderer: TemplateRenderer, place: str) -> None:
    """A04, A34: a limit inside a later turn, inside a tool result, on an end-of-turn token."""
    conversations = [tool_conversation("long", tool_text="0123456789"), tool_conversation("s", answer="9")]
    long = to_sample(conversations[0], renderer)
    turn = [i for i, m in enumerate(long.loss_mask) if m and long.turn[i] == 1]
    tool = [i for i, source in enumerate(long.source) if source == "tool"]
    limit = {"second turn": turn[2], "tool result": tool[3], "end of turn": turn[-1]}[place]
    samples, report = to_samples([conversations[0], tool_conversation("s", tool_text="", answer="")], renderer,
                                 max_length=limit) if place != "tool result" else ([], None)  # fmt: skip
    if report is None:
        with pytest.raises(ValueError, match=f"1 longer than {limit} tokens"):
            to_samples(conversations[:1], renderer, max_length=limit)
        return
    assert [sample.trajectory_id for sample in samples] == ["s"]
    assert report.dropped == {f"longer than {limit} tokens": 1}


def test_a34_a_long_conversation_is_kept_whole_or_dropped(renderer: TemplateRenderer) -> None:
    """A34: eight turns."""
    messages: list[Message] = [Message(role="system", content="Be brief.")]
    for index in range(8):
        messages += [Message(role="user", content=f"q{index}"), Message(role="assistant", content=f"a{index}")]
    conversation = Demonstration(task_id="eight", messages=tuple(messages), tools=(TOOL,))
    whole = to_sample(conversation, renderer)
    assert max(whole.turn) == 7
    assert to_samples([conversation], renderer, max_length=len(whole))[1].kept == 1
    with pytest.raises(ValueError, match="0 rows kept, dropped: 1 longer than"):
        to_samples([conversation], renderer, max_length=len(whole) - 1)


def test_a12_headers_and_separators_are_not_trained(
    tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer
) -> None:
    """A12: header 0, content and end of turn 1, the newline after it 0."""
    messages = (
        Message(role="user", content="?"), Message(role="assistant", content="ok"),
        Message(role="user", content="?"), Message(role="assistant", content="no"),
    )  # fmt: skip
    sample = to_sample(Demonstration(task_id="a12", messages=messages, tools=()), renderer)
    runs: list[tuple[bool, list[int]]] = []
    for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(token)
    assert [(trained, tokenizer.decode(ids)) for trained, ids in runs] == [
        (False, "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "ok<|im_end|>"),
        (False, "\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "no<|im_end|>"),
    ]


def test_a13_one_bos_and_the_same_opening_as_a_rollout(tmp_path: Path) -> None:
    """A13: the post-processor and the template both add a BOS token."""
    tokenizer = load_embedded_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    assert tokenizer.encode("x")[0] == bos
    renderer = TemplateRenderer(tokenizer, name="bos")
    conversation = tool_conversation("tower")
    rollout = [t for segment in renderer.opening(conversation.messages[:2], conversation.tools) for t in segment.token_ids]
    samples, _ = to_samples([conversation], renderer, max_length=400)
    row = trainer_batch(tmp_path, tokenizer, samples)["input_ids"][0].tolist()
    assert row.count(bos) == 1
    assert row[0] == bos
    assert row[: len(rollout)] == rollout


def test_a14_padding_with_the_end_of_turn_token(tmp_path: Path, renderer: TemplateRenderer) -> None:
    """A14: the real end tokens stay trained and seen; padding is what lies beyond a row's length."""
    tokenizer = load_embedded_tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    samples, _ = to_samples(some_conversations(2), renderer, max_length=400)
    batch = trainer_batch(tmp_path, tokenizer, samples)
    rows = {tuple(sample.token_ids): sample for sample in samples}
    assert len({len(ids) for ids in rows}) == 2
    for ids, labels, seen in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        n = int(seen.sum())
        sample = rows[tuple(ids[:n].tolist())]
        assert seen[:n].all()
        assert (labels[n:] == IGNORED).all()
        assert (labels[:n] != IGNORED).tolist() == list(sample.loss_mask)
        assert labels[n - 1] == renderer.stop_token_ids[0]


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


def test_a17_equal_texts(tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer) -> None:
    """A17: user, tool and assistant say the same."""
    sample = to_sample(tool_conversation("tower", question="ok", tool_text="ok", answer="ok"), renderer)
    last = [i for i, trained in enumerate(sample.loss_mask) if trained and sample.turn[i] == 1]
    assert last == list(range(len(sample) - len(last), len(sample)))
    assert trained_text(tokenizer, sample).endswith("</tool_call><|im_end|>ok<|im_end|>")
    assert trained_text(tokenizer, sample).count("ok") == 1 + "lookup".count("ok")


def test_a18_no_step_without_trained_tokens(tmp_path: Path, home: Path) -> None:
    """A18: all answers lie beyond the limit."""
    conversations = [tool_conversation(str(i), question="how? " * 60, answer="12345") for i in range(8)]
    data = save_conversations(tmp_path / "data.jsonl", conversations)
    with pytest.raises(ValueError, match="no demonstration is left to train on.*8 longer than 64 tokens"):
        sft(home, tmp_path / "run", data=str(data), max_length=64)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("template", ["ours", "qwen2_5.jinja"])
def test_a35_flags_follow_messages(template: str) -> None:
    """A35: two tool messages that a template makes one block of, a turn kept as context, a tool message at the end."""
    tokenizer = load_embedded_tokenizer()
    if template != "ours":
        tokenizer.chat_template = (TEMPLATES / template).read_text()
    renderer = TemplateRenderer(tokenizer, name=template)
    calls = tuple(ToolCall(call_id=f"call_{i}", name="lookup", arguments={"key": str(i)}) for i in range(2))
    messages = (
        Message(role="user", content="?"),
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content="1", call_id="call_0"),
        Message(role="tool", content="2", call_id="call_1"),
        Message(role="assistant", content="a mistake", train=False),
        Message(role="user", content="?"),
        Message(role="assistant", tool_calls=calls[:1]),
        Message(role="tool", content="3", call_id="call_0"),
    )
    sample = to_sample(Demonstration(task_id="a35", messages=messages, tools=(TOOL,)), renderer)
    trained = tuple(t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m)
    assert trained == renderer.turn_ids(messages[1]) + renderer.turn_ids(messages[6])
    assert max(sample.turn) == 2
    assert "a mistake" in tokenizer.decode(sample.token_ids)


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
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
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
