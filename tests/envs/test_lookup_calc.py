"""The agent of the textbooks: fair tasks, tools that say how to recover, a calculator that only calculates."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.base import Split
from envs.lookup_calc import ATTRIBUTES, CITIES, SYSTEM, TABLE, TOOLS, LookupCalc, last_number
from envs.sandbox.base import SandboxSpec
from envs.sandbox.local import LocalFactory
from envs.types import Message, Task, ToolCall, ToolResult

SPLITS: tuple[Split, Split] = ("train", "heldout")
# A busy machine is slow; no test of ours asserts a time.
no_clock = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], max_examples=40
)
Caller = Callable[..., ToolResult]
Worker = Callable[[Task, int], list[Message]]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sandboxes' folders are."""
    return tmp_path_factory.mktemp("sandboxes")


@pytest.fixture(scope="module")
def factory(runner: asyncio.Runner, folder: Path) -> Iterator[LocalFactory]:
    factory = LocalFactory(folder)
    yield factory
    runner.run(factory.close())


@pytest.fixture(scope="module")
def task() -> Task:
    return next(task for task in LookupCalc().tasks("train", 40, 0) if task.metadata["calls"] == 3)


@pytest.fixture(scope="module")
def call(runner: asyncio.Runner, factory: LocalFactory, task: Task) -> Iterator[Caller]:
    """One call in the sandbox of one task."""
    env = LookupCalc()
    sandbox = runner.run(factory.start(env.sandbox_spec(task)))

    def run(tool: str, **arguments: object) -> ToolResult:
        session = env.session(task, sandbox)
        return runner.run(session.call(ToolCall(call_id="c", name=tool, arguments=arguments)))

    yield run
    runner.run(sandbox.close())


def grade(runner: asyncio.Runner, factory: LocalFactory, task: Task, messages: Sequence[Message]) -> float:
    async def run() -> float:
        async with await factory.start(SandboxSpec()) as sandbox:
            return (await LookupCalc().session(task, sandbox).grade(messages))["success"]

    return runner.run(run())


def table(task: Task) -> dict[str, str]:
    return dict(line.split("\t") for line in task.files[TABLE].decode().splitlines())


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+", text)]


# Tasks.


def test_the_splits_share_no_city() -> None:
    train, heldout = (set(CITIES[split]) for split in SPLITS)
    assert not train & heldout
    for split in SPLITS:
        other = CITIES["train" if split == "heldout" else "heldout"]
        for task in LookupCalc().tasks(split, 200, 0):
            words = set(re.findall(r"\w+", task.prompt + task.files[TABLE].decode()))
            assert not words & set(other)
        if split == "heldout":
            cities = {key.split(" of ")[-1] for task in LookupCalc().tasks(split, 200, 0) for key in table(task)}
            assert cities <= set(CITIES[split])


def test_most_training_cities_are_made_up_so_names_cannot_be_learned_by_heart() -> None:
    cities = [key.split(" of ")[-1] for task in LookupCalc().tasks("train", 300, 0) for key in table(task)]
    made_up = [city for city in cities if city not in CITIES["train"]]
    assert 0.7 < len(made_up) / len(cities) < 0.9
    assert len(set(made_up)) > 500


def test_the_splits_share_no_task() -> None:
    seen = {split: {task.prompt for task in LookupCalc().tasks(split, 20_000, 0)} for split in SPLITS}
    sums = [prompt for prompt in seen["heldout"] if " of " not in prompt]
    assert len(sums) > 1000, "there are about 3,300 such questions, so most of the 4,800 pairs were drawn"
    assert not seen["train"] & seen["heldout"]


@pytest.mark.parametrize("split", SPLITS)
def test_all_tasks_of_a_set_differ(split: Split) -> None:
    tasks = LookupCalc().tasks(split, 300, 0)
    assert len({task.task_id for task in tasks}) == len({(task.prompt, task.files[TABLE]) for task in tasks}) == 300


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_seed_gives_the_same_tasks(split: Split) -> None:
    def everything(seed: int, count: int = 20) -> list[tuple[Task, object]]:
        return [(task, dict(task.hidden)) for task in LookupCalc().tasks(split, count, seed)]

    assert everything(3) == everything(3)
    assert everything(3, 30)[:20] == everything(3), "a longer set begins with the shorter one"
    assert not {task.prompt for task, _ in everything(3)} & {task.prompt for task, _ in everything(4)}


@pytest.mark.parametrize("max_calls", [1, 2, 3])
def test_max_calls_bounds_the_plan(max_calls: int) -> None:
    tasks = LookupCalc(max_calls=max_calls).tasks("train", 100, 0)
    assert {task.metadata["calls"] for task in tasks} == set(range(1, max_calls + 1))
    assert all(len(task.hidden["plan"]) == task.metadata["calls"] for task in tasks)


def test_call_weights_say_how_often_tasks_of_so_many_calls_come() -> None:
    def share(weights: tuple[float, float, float], calls: int, max_calls: int = 3) -> float:
        tasks = LookupCalc(max_calls=max_calls, call_weights=weights).tasks("train", 1000, 0)
        return sum(task.metadata["calls"] == calls for task in tasks) / len(tasks)

    assert [share((1, 1, 1), calls) for calls in (1, 2, 3)] == pytest.approx([1 / 3] * 3, abs=0.05)
    assert share((1, 1, 3), 3) == pytest.approx(0.6, abs=0.05)
    assert share((0, 1, 0), 2) == 1.0
    assert share((1, 1, 8), 1, max_calls=2) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("weights", [(0, 0, 0), (1, -1, 1), (1, 1)])
def test_call_weights_that_say_nothing_are_refused(weights: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="call_weights must be three numbers"):
        LookupCalc(call_weights=weights)
    with pytest.raises(ValueError, match="call_weights"):
        LookupCalc(call_weights=(0, 0, 1), max_calls=2)


@pytest.mark.parametrize("max_calls", [0, 4])
def test_max_calls_out_of_range_is_refused(max_calls: int) -> None:
    with pytest.raises(ValueError, match=f"max_calls must be 1, 2 or 3, not {max_calls}"):
        LookupCalc(max_calls=max_calls)


@pytest.mark.parametrize("split", SPLITS)
def test_nothing_that_is_hidden_is_seen_before_grading(split: Split) -> None:
    """What the model and the sandbox see does not depend on the hidden part, and holds neither plan nor answer.

    An answer may be a number of the question or of the table by coincidence; it is not there as a rule.
    """
    env = LookupCalc()
    coincidences = calculated = 0
    for task in env.tasks(split, 200, 0):
        blind = replace(task, hidden={})
        assert env.opening(blind) == env.opening(task) == [
            Message(role="system", content=SYSTEM), Message(role="user", content=task.prompt)
        ]  # fmt: skip
        assert env.sandbox_spec(blind) == env.sandbox_spec(task)
        assert list(task.files) == [TABLE]
        visible = f"{task.prompt}\n{task.files[TABLE].decode()}\n{dict(task.metadata)}"
        assert "lookup" not in visible
        assert "calculate" not in visible
        assert not any(argument in visible for tool, argument in task.hidden["plan"] if tool == "calculate")
        assert "hidden" not in repr(task)
        assert "'plan'" not in repr(task)
        assert task.files[TABLE].decode() not in repr(task)
        if task.hidden["plan"][-1][0] == "calculate":
            calculated += 1
            coincidences += task.hidden["answer"] in numbers(visible)
    assert calculated > 100
    assert coincidences < calculated / 4


@pytest.mark.parametrize("split", SPLITS)
def test_the_table_holds_the_facts_asked_for_and_others(split: Split) -> None:
    for task in LookupCalc().tasks(split, 100, 0):
        facts = table(task)
        assert len(facts) == 5
        assert all(key.startswith(ATTRIBUTES) and " of " in key for key in facts)
        asked = [argument for tool, argument in task.hidden["plan"] if tool == "lookup"]
        assert all(key in facts and key in task.prompt for key in asked)
        if task.hidden["plan"][-1][0] == "lookup":
            assert float(facts[asked[-1]]) == task.hidden["answer"]


# Demonstrations.


@pytest.mark.parametrize("split", SPLITS)
def test_every_demonstration_without_mistakes_earns_1(
    runner: asyncio.Runner, factory: LocalFactory, split: Split
) -> None:
    env = LookupCalc(mistake_rate=0.0)

    async def work(task: Task) -> float:
        async with await factory.start(env.sandbox_spec(task)) as sandbox:
            session = env.session(task, sandbox)
            messages = env.opening(task)
            for _ in range(4):
                messages.append(env.demonstrate(task, messages, 0))
                for asked in messages[-1].tool_calls:
                    result = await session.call(asked)
                    messages.append(Message(role="tool", content=result.content, call_id=result.call_id))
            assert messages[-1].train
            return (await session.grade(messages))["success"]

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(work(task) for task in env.tasks(split, 40, 1)))

    assert runner.run(all_of_them()) == [1.0] * 40


# Tools.


def test_every_fact_of_the_table_can_be_looked_up(call: Caller, task: Task) -> None:
    for key, value in table(task).items():
        result = call("lookup", key=key)
        assert (result.content, result.is_error, result.call_id) == (value, False, "c")


@pytest.mark.parametrize("key", ["area of Atlantis", "", "../table.tsv", "a\tb", "area of\nParis", "'", "x\0y", "-v"])
def test_an_unknown_key_is_told_the_known_ones(call: Caller, task: Task, key: str) -> None:
    result = call("lookup", key=key)
    assert result.is_error
    assert result.content.startswith("error: unknown key '")
    assert result.content.endswith("known keys: " + ", ".join(table(task)))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "unexpected end"),
        ("1 +", "unexpected end"),
        ("1 2", "two numbers without an operator between them"),
        ("(1", "missing ')'"),
        ("1)", "unexpected ')'"),
        ("2 ** 3", "unexpected '*'"),
        ("1.5.2", "unexpected '.'"),
        ("1 / 0", "division by zero"),
        ("1 / (2 - 2)", "division by zero"),
        ("x + 1", "unexpected 'x'"),
        ("1,000 + 1", "unexpected ','"),
        ("1e5", "unexpected 'e'"),
        ("(" * 80 + "1" + ")" * 80, "too many nested parentheses"),
        ("-" * 80 + "1", "too many nested parentheses"),
    ],
)
def test_a_malformed_expression_is_told_the_form(call: Caller, expression: str, reason: str) -> None:
    result = call("calculate", expression=expression)
    assert result.is_error
    assert result.content == f"error: {reason} in '{expression}'; use numbers, + - * / and parentheses"


@pytest.mark.parametrize(
    "expression",
    [
        "open('x')",
        "__import__('os').system('touch x')",
        "system(\"touch x\")",
        "$(touch x)",
        "`touch x`",
        "1; touch x",
        '1" | "touch x',
        "{ print > \"x\" }",
        "@load \"x\"",
        "place = 99",
        "ARGV[1]",
        "\\047",
    ],
)  # fmt: skip
def test_text_that_looks_like_code_is_never_executed(call: Caller, folder: Path, expression: str) -> None:
    before = sorted(folder.rglob("*"))
    assert [path.name for path in before if path.is_file()] == [TABLE]
    result = call("calculate", expression=expression)
    assert result.is_error
    assert "use numbers, + - * / and parentheses" in result.content
    assert call("lookup", key=expression).is_error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("expression", ["9" * 400, "9" * 200 + " * " + "9" * 200, "9" * 400 + " - " + "9" * 400])
def test_a_result_that_is_no_number_is_an_error_and_what_is_long_is_cut(call: Caller, expression: str) -> None:
    result = call("calculate", expression=expression)
    assert result.is_error
    assert result.content.startswith("error: the result is too large in '999")
    assert len(result.content) < 350
    assert len(call("lookup", key="x" * 5000).content) < 600


@pytest.mark.parametrize("text", ["é + 1", "1 + \u0663", "\ud83c", "1\0+1", "\U0001f378" * 50, "9" * 200_000])
def test_any_text_is_an_observation(call: Caller, text: str) -> None:
    for result in (call("calculate", expression=text), call("lookup", key=text)):
        assert result.is_error
        assert result.content.startswith("error: ")
        result.content.encode("utf-8")


def test_unknown_tools_and_arguments_are_told_what_there_is(call: Caller) -> None:
    unknown = call("search", query="x")
    assert (unknown.content, unknown.is_error) == ("error: unknown tool 'search'; tools: lookup, calculate", True)
    for arguments in ({}, {"key": "x", "city": "y"}, {"key": 3}, {"expression": "1"}):
        result = call("lookup", **arguments)
        assert result.is_error
        assert result.content.startswith("error: lookup: ")
        assert result.content.endswith("; arguments: key")


class Written:
    """An expression as text, and its exact value."""

    def __init__(self, text: str, value: Fraction) -> None:
        self.text = text
        self.value = value

    def __repr__(self) -> str:
        return self.text


def joined(left: Written, operator: str, right: Written) -> Written | None:
    if operator == "/" and right.value == 0:
        return None
    value = {
        "+": lambda: left.value + right.value,
        "-": lambda: left.value - right.value,
        "*": lambda: left.value * right.value,
        "/": lambda: left.value / right.value,
    }[operator]()
    return Written(f"({left.text} {operator} {right.text})", value)


integers = st.integers(0, 999).map(lambda n: Written(str(n), Fraction(n)))
decimals = st.tuples(st.integers(0, 99), st.integers(0, 99)).map(
    lambda pair: Written(f"{pair[0]}.{pair[1]:02d}", Fraction(100 * pair[0] + pair[1], 100))
)
expressions = st.recursive(
    integers | decimals,
    lambda inner: (
        st.builds(joined, inner, st.sampled_from("+-*/"), inner).filter(bool)
        | inner.map(lambda e: Written(f"-{e.text}", -e.value))
    ),
    max_leaves=6,
)


@no_clock
@given(expression=expressions)
def test_the_calculator_is_exact_arithmetic(call: Caller, expression: Written) -> None:
    result = call("calculate", expression=expression.text)
    assert not result.is_error, result.content
    assert float(result.content) == pytest.approx(float(expression.value), rel=1e-9, abs=1e-9)


@no_clock
@given(parts=st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 99)), max_size=5), first=st.integers(0, 99))
def test_products_bind_closer_and_both_bind_to_the_left(call: Caller, first: int, parts: list[tuple[str, int]]) -> None:
    text = str(first) + "".join(f" {operator} {number}" for operator, number in parts)
    terms = [Fraction(first)]
    for operator, number in parts:
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(Fraction(number if operator == "+" else -number))
    assert call("calculate", expression=text).content.replace("-0", "0") == str(sum(terms)).replace("-0", "0")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("9 / 3 / 2", "1.5"), ("10 - 3 - 2", "5"), ("2--3", "5"), ("-(2+3)*2", "-10"), (".5*2", "1")],
)
def test_values_by_hand(call: Caller, expression: str, value: str) -> None:
    assert call("calculate", expression=expression).content == value


# Grading.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 + 3 makes 1,015.", 1015.0),
        ("The answer is -21.", -21.0),
        ("The answer is 4.50", 4.5),
        ("first 3, then 4", 4.0),
        ("1, 2", 2.0),
        ("1,2", 2.0),
        ("7, 8,", 8.0),
        ("It is -12,345.5.", -12345.5),
        ("none", None),
        ("", None),
        ("-", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@no_clock
@given(text=st.text(max_size=30))
def test_any_text_has_a_last_number_or_none(text: str) -> None:
    assert last_number(text) is None or isinstance(last_number(text), float)


def test_only_the_final_assistant_message_is_graded(runner: asyncio.Runner, factory: LocalFactory, task: Task) -> None:
    answer = f"The answer is {task.hidden['answer']:.0f}."
    asked = ToolCall(call_id="c", name="calculate", arguments={"expression": "1"})
    opening = LookupCalc().opening(task)
    right, wrong = (
        Message(role="assistant", content=answer),
        Message(role="assistant", content="The answer is 1000000."),
    )
    cases: list[tuple[list[Message], float]] = [
        ([right], 1.0),
        ([Message(role="assistant", content=f"Not 7, but {task.hidden['answer']:,.1f}")], 1.0),
        ([wrong], 0.0),
        ([right, wrong], 0.0),
        ([Message(role="assistant", content=f"{answer} Or 1000000.")], 0.0),
        ([Message(role="assistant", content="No idea.")], 0.0),
        ([Message(role="assistant", content=answer, tool_calls=(asked,))], 0.0),
        ([Message(role="tool", content=answer, call_id="c")], 0.0),
        ([Message(role="user", content=answer)], 0.0),
        ([], 0.0),
    ]
    for messages, reward in cases:
        assert grade(runner, factory, task, [*opening, *messages]) == reward, messages


def test_the_tools_are_what_the_schemas_say() -> None:
    assert [tool.name for tool in TOOLS] == ["lookup", "calculate"]
    for tool in TOOLS:
        assert tool.parameters["additionalProperties"] is False
        assert tool.parameters["required"] == list(tool.parameters["properties"])
