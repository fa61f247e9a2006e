"""The agent of the textbooks: facts are looked up in a table, numbers are calculated, the answer is one number.

Each task has a table of its own with random values, so a fact can only come from the tools. Tasks need one to three
calls and come from templates. The held-out split uses real cities that the training split never names, and pairs of
numbers that it never asks for; most of the training split's cities are made up, so a policy must learn to copy names
and cannot learn them by heart.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from envs.base import Split
from envs.sandbox.base import Sandbox, SandboxSpec
from envs.tools import call_error
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec

SYSTEM = "Use the tools, one call at a time. End with: The answer is N."
TABLE = "table.tsv"
CALL_TIMEOUT_S = 60.0  # a last bound; the deadline of whoever calls comes first

TOOLS = (
    ToolSpec(
        name="lookup",
        description="Look up a fact in the table.",
        parameters={
            "type": "object",
            "properties": {"key": {"type": "string", "description": "such as: area of Paris"}},
            "required": ["key"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        name="calculate",
        description="Calculate with + - * / and parentheses.",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    ),
)

ATTRIBUTES = ("population", "area", "height", "age", "number of parks", "number of bridges")
CITIES: Mapping[Split, tuple[str, ...]] = {
    "train": tuple(
        "Paris Rome Oslo Lima Cairo Tokyo Delhi Madrid Berlin Vienna Dublin Athens Prague Warsaw Lisbon Seoul Hanoi "
        "Quito Havana Nairobi Accra Tunis Amman Riga Vilnius Tallinn Helsinki Bern Zagreb Sofia Tirana Skopje Minsk "
        "Kyiv Baku Tbilisi Yerevan Tehran Kabul Dhaka Manila Jakarta Sydney Perth Boston Denver Dallas Austin".split()
    ),
    "heldout": tuple(
        "London Milan Turin Porto Malaga Geneva Lyon Ghent Bruges Krakow Gdansk Bergen Aarhus Malmo Tampere Kaunas "
        "Odessa Varna Split Patras Izmir Haifa Aleppo Muscat Karachi Mumbai Osaka Busan Cebu Darwin Miami "
        "Tucson".split()
    ),
}

# Training cities: this share is made up of two or three syllables, the rest is in the list.
MADE_UP_SHARE = 0.8
ONSETS = "b c d f g h j k l m n p r s t v w z br ch cr dr fl gr kr pl pr sh st tr th".split()
VOWELS = "a e i o u y ai au ea ie oo ou".split()
CODAS = ("", "", "", *"d g k l m n n r r s t ck ll nd ng nn rt ss".split())

# (question, plan): each step of a plan is a tool and its argument; {a} and {b} are the facts asked for, {n} is a
# number in the question, and {0}, {1} are the results of earlier steps. Facts are looked up in the question's order.
TEMPLATES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("What is the {a}?", (("lookup", "{a}"),)),
    ("Tell me the {a}.", (("lookup", "{a}"),)),
    ("What is {n} plus {m}?", (("calculate", "{n} + {m}"),)),
    ("What is {n} times {m}?", (("calculate", "{n} * {m}"),)),
    ("What is the {a} plus {n}?", (("lookup", "{a}"), ("calculate", "{0} + {n}"))),
    ("Add {n} to the {a}.", (("lookup", "{a}"), ("calculate", "{0} + {n}"))),
    ("What is the {a} minus {n}?", (("lookup", "{a}"), ("calculate", "{0} - {n}"))),
    ("Take {n} from the {a}.", (("lookup", "{a}"), ("calculate", "{0} - {n}"))),
    ("What is the {a} times {n}?", (("lookup", "{a}"), ("calculate", "{0} * {n}"))),
    ("Multiply {n} by the {a}.", (("lookup", "{a}"), ("calculate", "{0} * {n}"))),
    ("What is the {a} plus the {b}?", (("lookup", "{a}"), ("lookup", "{b}"), ("calculate", "{0} + {1}"))),
    ("Add the {a} to the {b}.", (("lookup", "{a}"), ("lookup", "{b}"), ("calculate", "{0} + {1}"))),
    ("What is the {a} minus the {b}?", (("lookup", "{a}"), ("lookup", "{b}"), ("calculate", "{0} - {1}"))),
    ("Take the {a} from the {b}.", (("lookup", "{a}"), ("lookup", "{b}"), ("calculate", "{1} - {0}"))),
    ("Multiply the {a} by the {b}.", (("lookup", "{a}"), ("lookup", "{b}"), ("calculate", "{0} * {1}"))),
)


class LookupCalc:
    """The environment. It has no state; everything that varies is in the task.

    Args:
        max_calls: only tasks that need at most so many calls (1 to 3).
        call_weights: how often tasks that need one, two and three calls come, relative to each other.
        mistake_rate: share of a demonstration's calls that are wrong: a wrong key is corrected after its error, a wrong
            sum earns no reward.
    """

    name = "lookup_calc"

    def __init__(
        self, *, max_calls: int = 3, call_weights: Sequence[float] = (1, 1, 1), mistake_rate: float = 0.1
    ) -> None:
        if not 1 <= max_calls <= 3:
            raise ValueError(f"lookup_calc: max_calls must be 1, 2 or 3, not {max_calls}")
        self._weights = list(call_weights[:max_calls])
        if len(call_weights) != 3 or min(call_weights) < 0 or not sum(self._weights) > 0:
            raise ValueError(f"lookup_calc: call_weights must be three numbers, not all 0, not {call_weights}")
        self._mistake_rate = mistake_rate

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return TOOLS

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        # A string seed hashes the same in every process; the split is part of it.
        rng = random.Random(f"{self.name}/{split}/{seed}")
        return [self._task(f"{split}-{seed}-{index}", split, rng) for index in range(count)]

    def _task(self, task_id: str, split: Split, rng: random.Random) -> Task:
        calls = rng.choices(range(1, len(self._weights) + 1), self._weights)[0]
        question, plan = rng.choice([row for row in TEMPLATES if len(row[1]) == calls])
        keys = [f"{attribute} of {city}" for city in _cities(split, rng) for attribute in ATTRIBUTES]
        a, b, *others = rng.sample(keys, 5)
        values = {key: rng.randint(2, 99) for key in (a, b, *others)}
        n, m = rng.randint(2, 99), rng.randint(2, 99)
        while "{m}" in question and _is_heldout_sum(n, m) != (split == "heldout"):
            n, m = rng.randint(2, 99), rng.randint(2, 99)
        words = {"a": a, "b": b, "n": str(n), "m": str(m)}
        steps = [(tool, _fill(argument, words)) for tool, argument in plan]
        rows = sorted(values.items(), key=lambda _: rng.random())
        return Task(
            task_id=task_id,
            prompt=question.format(**words),
            files={TABLE: "".join(f"{key}\t{value}\n" for key, value in rows).encode()},
            metadata={"calls": len(steps)},
            hidden={"answer": _solve(steps, values), "plan": steps},
        )

    def opening(self, task: Task) -> list[Message]:
        return [Message(role="system", content=SYSTEM), Message(role="user", content=task.prompt)]

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        return SandboxSpec(files=task.files)

    def session(self, task: Task, sandbox: Sandbox) -> LookupCalcSession:
        return LookupCalcSession(task, sandbox)

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        rng = random.Random(f"{task.task_id}/{seed}/{len(messages)}")
        tool_messages = [message for message in messages if message.role == "tool"]
        results = [message.content for message in tool_messages if not message.content.startswith("error:")]
        plan: list[tuple[str, str]] = task.hidden["plan"]
        if len(results) == len(plan):
            return Message(role="assistant", content=f"The answer is {results[-1]}.")
        tool, argument = plan[len(results)]
        argument = _fill_results(argument, results)
        if rng.random() < self._mistake_rate:
            # A key that is misspelled earns an error to recover from; a wrong sum is found out by the reward.
            argument = argument.replace(" of ", " in ") if tool == "lookup" else argument + "0"
            return _calling(tool, argument, len(messages), train=False)
        return _calling(tool, argument, len(messages), train=True)


class LookupCalcSession:
    """One attempt: both tools run as one awk command in the task's sandbox."""

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self._task = task
        self._sandbox = sandbox

    async def call(self, call: ToolCall) -> ToolResult:
        started = time.perf_counter()
        error = call_error(call, TOOLS)
        if error is None:
            argument = str(call.arguments["key" if call.name == "lookup" else "expression"])
            argv = ["awk", _program(), call.name, argument.replace("\0", "\N{REPLACEMENT CHARACTER}"), TABLE]
            done = await self._sandbox.exec(argv, timeout_s=CALL_TIMEOUT_S)
            content = done.stdout.strip() or f"error: {call.name} failed: {done.stderr.strip() or done.exit_code}"
            if done.timed_out:
                content = f"error: {call.name} gave no result within {CALL_TIMEOUT_S:g} s"
            is_error = done.exit_code != 0
        else:
            content, is_error = error, True
        duration_s = time.perf_counter() - started
        return ToolResult(call_id=call.call_id, content=content, is_error=is_error, duration_s=duration_s)

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        last = messages[-1]
        said = last_number(last.content) if last.role == "assistant" and not last.tool_calls else None
        right = said is not None and abs(said - self._task.hidden["answer"]) < 1e-6
        return {"success": 1.0 if right else 0.0}


def _is_heldout_sum(n: int, m: int) -> bool:
    """A question that names two numbers and no city is told apart by them."""
    return (n + m) % 4 == 0


def _cities(split: Split, rng: random.Random) -> list[str]:
    """Three different cities."""
    cities: dict[str, None] = {}
    while len(cities) < 3:
        made_up = split == "train" and rng.random() < MADE_UP_SHARE
        cities[_made_up_city(rng) if made_up else rng.choice(CITIES[split])] = None
    return list(cities)


def _made_up_city(rng: random.Random) -> str:
    name = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((2, 2, 3))))
    name = name.capitalize()
    return f"{name}a" if name in CITIES["heldout"] else name


def last_number(text: str) -> float | None:
    """The last number in a text; thousands may be grouped with commas.

    >>> last_number("12 + 3 makes 1,015.")
    1015.0
    """
    found = re.findall(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


def _program() -> str:
    return files("envs").joinpath("lookup_calc.awk").read_text(encoding="utf-8")


def _calling(tool: str, argument: str, index: int, *, train: bool) -> Message:
    name: str = next(iter(next(spec for spec in TOOLS if spec.name == tool).parameters["properties"]))
    call = ToolCall(call_id=f"call_{index}", name=tool, arguments={name: argument})
    return Message(role="assistant", tool_calls=(call,), train=train)


def _fill(argument: str, words: Mapping[str, str]) -> str:
    """Fill in the question's words; {0} and {1} stay, they are known only when the tools have answered."""
    return argument.format("{0}", "{1}", **words)


def _fill_results(argument: str, results: Sequence[str]) -> str:
    return argument.format(*results) if "{" in argument else argument


def _solve(steps: Sequence[tuple[str, str]], values: Mapping[str, int]) -> float:
    """The gold answer, worked out here and not by the tools that the model uses."""
    results: list[Any] = []
    for tool, argument in steps:
        argument = _fill_results(argument, results)
        if tool == "lookup":
            results.append(values[argument])
        else:
            left, operator, right = argument.split()
            x, y = int(left), int(right)
            results.append({"+": x + y, "-": x - y, "*": x * y}[operator])
    return float(results[-1])
