"""Which tokens a warm start trains, down to the batch that the trainer's own data loader makes.

Ids are those of public faults of other trainers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from data.demonstrations import Demonstration, to_sample, to_samples
from data.template_renderer import TemplateRenderer
from data.types import TrainingSample
from envs.types import Message, ToolCall
from tests.train.tiny import TOOL, load_embedded_tokenizer, save_model, some_conversations, tool_conversation
from train.config import CheckpointConfig, OptimizerConfig, SftConfig
from train.sft import make_trainer, sft_arguments
from train.sft_data import IGNORED, trained_by_source

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_embedded_tokenizer()


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerBase) -> TemplateRenderer:
    return TemplateRenderer(tokenizer, name="tiny")


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
    """A04: a limit inside a later turn, inside a tool result, on an end-of-turn token."""
    conversation = tool_conversation("long", question="how high? " * 3, tool_text="0123456789")
    long = to_sample(conversation, renderer)
    assert len(long) == len(long.loss_mask)
    turn = [i for i, trained in enumerate(long.loss_mask) if trained and long.turn[i] == 1]
    tool = [i for i, source in enumerate(long.source) if source == "tool"]
    limit = {"second turn": turn[2], "tool result": tool[3], "end of turn": turn[-1]}[place]
    samples, report = to_samples([conversation, tool_conversation("s")], renderer, max_length=limit)
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
    rollout = [
        t for segment in renderer.opening(conversation.messages[:2], conversation.tools) for t in segment.token_ids
    ]
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


def test_a17_equal_texts(tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer) -> None:
    """A17: user, tool and assistant say the same."""
    sample = to_sample(tool_conversation("tower", question="ok", tool_text="ok", answer="ok"), renderer)
    last = [i for i, trained in enumerate(sample.loss_mask) if trained and sample.turn[i] == 1]
    assert last == list(range(len(sample) - len(last), len(sample)))
    assert trained_text(tokenizer, sample).endswith("</tool_call><|im_end|>ok<|im_end|>")
    assert trained_text(tokenizer, sample).count("ok") == 1 + "lookup".count("ok")


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


@pytest.mark.parametrize(
    "key", ["response_template", "instruction_template", "response_part", "train_on_responses_only"]
)
def test_a33_no_key_names_a_marker(key: str) -> None:
    """A33: a marker of text that is cut into other tokens in its context masks everything, or nothing. None is asked
    for, and one that is given is refused by its name."""
    with pytest.raises(ValueError, match=rf"{key}\n\s+Extra inputs are not permitted"):
        SftConfig.model_validate({"data": "d.jsonl", key: "<|im_start|>assistant"})


@pytest.mark.parametrize("behind", ["\\n", ""])
def test_a33_masks_are_not_found_by_text(behind: str) -> None:
    """Whatever stands behind the header of a turn, and wherever a message says it: what is trained is the turn."""
    tokenizer = load_embedded_tokenizer()
    template = tokenizer.chat_template
    assert isinstance(template, str)
    assert "<|im_start|>assistant\\n" in template
    tokenizer.chat_template = template.replace("<|im_start|>assistant\\n", f"<|im_start|>assistant{behind}")
    renderer = TemplateRenderer(tokenizer, name="tiny")
    said = "<|im_start|>assistant\nTrain me."
    conversation = tool_conversation("a", question=said, tool_text=said)
    trained = trained_text(tokenizer, to_sample(conversation, renderer))
    turns = [renderer.turn_ids(message) for message in conversation.messages if message.role == "assistant"]
    assert trained == "".join(map(renderer.decode, turns))
    assert "It is 12." in trained
    assert "Train me" not in trained
