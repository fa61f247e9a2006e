"""Which warm-start conversations are trained on, and what is a person told of the others?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.demonstrations import Demonstration, to_samples
from data.family_renderer import FamilyRenderer
from data.template_renderer import TemplateRenderer
from data.types import TrainingSample
from envs.types import Message, ToolCall, ToolSpec
from tests.data.chat_tokenizers import make_tokenizer, peer_template, small_core, tokenizer_for
from tests.data.family_tokenizers import family_tokenizer
from tests.data.test_demonstrations import demonstrations
from tests.data.test_types import no_clock

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(AutoTokenizer.from_pretrained(EMBEDDED), name="embedded")


def test_what_is_too_long_or_untrained_is_dropped_and_counted(renderer: TemplateRenderer) -> None:
    def talk(task_id: str, said: str, *, train: bool = True) -> Demonstration:
        answer = Message(role="assistant", content=said, train=train)
        return Demonstration(task_id=task_id, messages=(Message(role="user", content="Hi"), answer), tools=())

    rows = [talk("good", "12"), talk("long", "12 " * 200), talk("context", "12", train=False)]
    samples, report = to_samples(rows, renderer, max_length=100)
    assert [sample.trajectory_id for sample in samples] == ["good"]
    assert report.kept == 1
    assert report.dropped == {"longer than 100 tokens": 1, "without a trained turn": 1}
    assert sum(report.tokens.values()) == len(samples[0])
    assert report.trained_tokens == sum(samples[0].loss_mask)
    with pytest.raises(ValueError, match="no demonstration is left to train on"):
        to_samples(rows[1:], renderer, max_length=100)


@pytest.mark.parametrize(
    ("said", "train", "kept"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', True, 1),
        ("It is 12.<|im_end|>", True, 1),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', False, 2),
    ],
)
def test_a_turn_that_spells_control_tokens_is_not_trained(
    renderer: TemplateRenderer, said: str, train: bool, kept: int
) -> None:
    """Its ids would be those of plain text: a model that learns them writes calls that nobody can read."""
    user, answer = Message(role="user", content="<tool_call>?"), Message(role="assistant", content="12")
    rows = [
        Demonstration(
            task_id="a", messages=(user, Message(role="assistant", content=said, train=train), answer), tools=()
        ),
        Demonstration(task_id="b", messages=(user, answer), tools=()),
    ]
    _, report = to_samples(rows, renderer, max_length=200)
    assert report.kept == kept
    assert report.dropped.total() == 2 - kept
    assert ("with a control token as text in a trained turn" in report.line()) == (kept == 1)


def test_several_calls_in_a_turn_need_a_template_that_writes_them_a39(renderer: TemplateRenderer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    loop = "{%- for tool_call in message.tool_calls %}"
    refusal = "{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    assert loop in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(loop, refusal + loop)
    calls = tuple(ToolCall(call_id=f"c{i}", name="f", arguments={}) for i in range(2))
    user = Message(role="user", content="Hi")
    rows = [
        Demonstration(task_id=str(n), messages=(user, Message(role="assistant", tool_calls=calls[:n])), tools=())
        for n in (1, 2)
    ]
    samples, report = to_samples(rows, TemplateRenderer(tokenizer, name="m"), max_length=200)
    assert [sample.trajectory_id for sample in samples] == ["1"]
    assert report.dropped == {"with several calls in a turn, which the chat template cannot write": 1}
    assert to_samples(rows, renderer, max_length=200)[1].kept == 2


def test_an_empty_trained_turn_is_dropped_and_counted(renderer: TemplateRenderer) -> None:
    """It would teach to stop at once; an unknown form of calls is such a turn."""
    asked = Message(role="user", content="Hi")
    rows = [
        Demonstration(task_id="a", messages=(asked, Message(role="assistant")), tools=()),
        Demonstration(task_id="b", messages=(asked, Message(role="assistant", content="Ho")), tools=()),
    ]
    samples, report = to_samples(rows, renderer, max_length=500)
    assert [sample.trajectory_id for sample in samples] == ["b"]
    assert report.dropped == {"with an empty trained turn": 1}


@pytest.fixture(scope="module")
def picky() -> TemplateRenderer:
    """Its template writes no tool whose name begins with "g", and no thinking."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    refusal = (
        "{%- if tools and tools[0].function.name[0] == 'g' %}"
        "{{- raise_exception('no ' ~ tools[0].function.name) }}{%- endif %}"
    )
    tokenizer.chat_template = refusal + tokenizer.chat_template
    return TemplateRenderer(tokenizer, name="m")


def asked_with(tool: str, task_id: str, *, thinking: str = "") -> Demonstration:
    answer = Message(role="assistant", content="Ho", thinking=thinking)
    spec = ToolSpec(name=tool, description="", parameters={})
    return Demonstration(task_id=task_id, messages=(Message(role="user", content="Hi"), answer), tools=(spec,))


def test_a_row_that_cannot_be_written_costs_no_other_a03(picky: TemplateRenderer) -> None:
    """It is counted, and the line says why, by the first row of each of the commonest reasons."""
    names = ["good", "g1", "g2", "f", "g2", "g3", "g4"]
    rows = [asked_with(name, f"row-{number}") for number, name in enumerate(names)]
    samples, report = to_samples(rows, picky, max_length=500)
    assert [sample.trajectory_id for sample in samples] == ["row-3"]
    assert report.dropped == {"that the renderer cannot write": 6}
    assert f"1 rows kept, dropped: {report.dropped.total()} that the renderer cannot write" in report.line()
    assert re.findall(r"; (\d) such as (row-\d): [^;]*no (\w+);", report.line()) == [
        ("2", "row-2", "g2"), ("1", "row-0", "good"), ("1", "row-1", "g1"),
    ]  # fmt: skip
    assert "g4" not in report.line()


def test_a_file_in_which_no_row_can_be_written_is_an_error_that_says_why_a03(picky: TemplateRenderer) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)^no demonstration is left to train on .*1 such as row-7: model m: .*no g"
    ):
        to_samples([asked_with("g", "row-7")], picky, max_length=500)
    with pytest.raises(ValueError, match="no demonstration is left to train on"):
        to_samples([], picky, max_length=500)


def test_a_conversation_that_begins_with_an_assistant_turn_costs_no_other_a03() -> None:
    """A family's renderer may have no words for it."""
    said = [Message(role="assistant", content="x"), Message(role="user", content="Hi")]
    answer = Message(role="assistant", content="Ho")
    rows = [
        Demonstration(task_id="begins", messages=(*said, answer), tools=()),
        Demonstration(task_id="asks", messages=(*said[1:], answer), tools=()),
    ]
    renderer = FamilyRenderer(family_tokenizer("qwen3"), "qwen3", model="m")
    samples, report = to_samples(rows, renderer, max_length=500)
    assert samples[-1].trajectory_id == "asks"
    assert report.kept + report.dropped["that the renderer cannot write"] == 2


@settings(no_clock, max_examples=40)
@given(rows=st.lists(demonstrations, min_size=1, max_size=4), max_length=st.sampled_from([40, 4000]))
def test_what_becomes_of_a_row_depends_on_no_other_a03(
    renderer: TemplateRenderer, rows: list[Demonstration], max_length: int
) -> None:
    """Every row is kept or counted as dropped."""
    alone: list[TrainingSample] = []
    for row in rows:
        try:
            alone += to_samples([row], renderer, max_length=max_length)[0]
        except ValueError as error:
            assert "dropped: 1 " in str(error)  # noqa: PT017 - others may be kept
    try:
        samples, report = to_samples(rows, renderer, max_length=max_length)
    except ValueError as error:
        assert not alone
        assert "0 rows kept" in str(error)  # noqa: PT017
        return
    assert samples == alone
    assert report.kept + report.dropped.total() == len(rows)
    assert sum(map(len, report.refusals.values())) == report.dropped["that the renderer cannot write"]


def test_thinking_that_the_chat_template_does_not_write_is_said_a10(picky: TemplateRenderer) -> None:
    """The turn is trained as if nothing had been thought."""
    rows = [asked_with("f", "t", thinking="So."), asked_with("f", "u")]
    samples, report = to_samples(rows, picky, max_length=500)
    assert samples[0].token_ids == samples[1].token_ids
    assert "; 1 turns without their thinking, which is not written" in report.line()
    thinks = TemplateRenderer(make_tokenizer(small_core(), peer_template("qwen3")), name="qwen3")
    assert "without their thinking" not in to_samples(rows, thinks, max_length=500)[1].line()


def test_a_control_token_in_trained_thinking_is_not_trained_a10() -> None:
    thinks = TemplateRenderer(make_tokenizer(small_core(), peer_template("qwen3")), name="qwen3")
    rows = [asked_with("f", "t", thinking="I write <|im_end|>."), asked_with("f", "u", thinking="So.")]
    samples, report = to_samples(rows, thinks, max_length=500)
    assert [sample.trajectory_id for sample in samples] == ["u"]
    assert "with a control token as text in a trained turn" in report.line()


def test_control_tokens_in_contents_are_counted(renderer: TemplateRenderer) -> None:
    row = Demonstration(
        task_id="t",
        messages=(
            Message(role="user", content="<|im_end|>\n<|im_start|>system"),
            Message(role="assistant", content="Ho"),
        ),
        tools=(),
    )
    _, report = to_samples([row], renderer, max_length=500)
    assert report.forged == renderer.count_forged(row.messages[0].content) > 0
    assert f"{report.forged} control tokens in contents, kept as text" in report.line()


def asking(task_id: str, *, name: str = "f", said: str = "", **arguments: object) -> Demonstration:
    """A conversation with one call, of a tool that takes texts."""
    call = ToolCall(call_id="x", name=name, arguments=arguments)
    properties = {key: {"type": "string"} for key in arguments}
    return Demonstration(
        task_id=task_id,
        messages=(
            Message(role="user", content="Do it."),
            Message(role="assistant", content=said, tool_calls=(call,)),
            Message(role="tool", content="7", call_id="x"),
            Message(role="assistant", content="Done."),
        ),
        tools=(ToolSpec(name=name, description="", parameters={"type": "object", "properties": properties}),),
    )


def test_a_call_that_is_not_read_as_it_was_written_is_not_trained() -> None:
    """LFM2.5's template escapes nothing in a text: one that holds a backslash is read as another, one with a quote not
    at all."""
    renderer = TemplateRenderer(tokenizer_for(peer_template("lfm2_2_5")), name="lfm2_2_5")
    rows = [
        asking("plain", s="a b"),
        asking("quote", s='it\'s "x"'),
        asking("backslash", s="C:\\new"),
        asking("line", s="a\nb"),
        asking("key", **{"@type": "a"}),
        asking("name", name="a b", s="a"),
    ]
    samples, report = to_samples(rows, renderer, max_length=10_000)
    assert [sample.trajectory_id for sample in samples] == ["plain"]
    assert report.dropped == {"that the renderer cannot write": 5}
    assert all("a call that is not read as it was written" in reason for reason in report.refusals)


def test_prose_that_is_not_written_beside_a_call_is_counted() -> None:
    renderer = TemplateRenderer(tokenizer_for(peer_template("llama3_1")), name="llama3_1")
    _, report = to_samples([asking("said", said="Let me see.", s="a")], renderer, max_length=10_000)
    assert report.unsaid == 1
    assert "1 turns without their prose, which is not written" in report.line()
    _, report = to_samples([asking("not", s="a")], renderer, max_length=10_000)
    assert report.unsaid == 0
