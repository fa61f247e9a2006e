"""What does the embedded base model read before anybody trains it?

Text made on the fly from a seed: prose about cities and numbers, and many forms of copying, because copying a
name or a number out of the context is what a tool call is made of. It holds plain chats, so that turns are
known, and no tools: no call, no result, no list of tools. How to use tools is for later training to teach.

A document is a string; it may hold the control tokens `START` and `END` around the turns of a chat.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator, Sequence

from envs.lookup_calc import ATTRIBUTES, CITIES, SYSTEM, TOOLS

START, END = "<|im_start|>", "<|im_end|>"

ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kr pr sh sl sp st th tr".split() + [""] * 6
VOWELS = "a e i o u y a e i o u ai au ea ie oo ou".split()
CODAS = ["", "", "", *"d g k l m n n p r r s s t x ck ll nd ng nn rt ss st".split()]
ENDINGS = ["", "", "", "", "a", "o", "ia", "en", "in", "on", "an", "as", "is", "burg", "ton", "ville", "go", "ka", "ow"]
NOUNS = "length weight depth price rank budget score width speed power cost debt age area height population".split()
PARTS = "parks bridges roads schools towers lakes shops trains rivers gates".split()
WORDS = (
    "the of a in is and to for on with was has there are from by that at it its as than more many old new small large "
    "near far city town people value record first last next note list item total number year day street north south "
    "we they one two three about after before under over between says say tell ask find give take add keep need".split()
)


def syllable(rng: random.Random) -> str:
    return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)


def pseudo_name(rng: random.Random) -> str:
    """A capitalised name of one to three syllables that is (nearly always) new, and never a held-out city."""
    syllables = "".join(syllable(rng) for _ in range(rng.choice((1, 2, 2, 2, 3))))
    name = (syllables + rng.choice(ENDINGS)).capitalize()
    return f"{name}a" if name in CITIES["heldout"] else name


def city(rng: random.Random) -> str:
    return rng.choice(CITIES["train"]) if rng.random() < 0.2 else pseudo_name(rng)


def number(rng: random.Random) -> str:
    """One to five digits, seldom negative; two digits are the most usual."""
    digits = rng.choice((1, 2, 2, 2, 2, 3, 3, 4, 5))
    value = rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)
    return str(-value if rng.random() < 0.15 else value)


def attribute(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(ATTRIBUTES)
    return rng.choice(NOUNS) if rng.random() < 0.6 else f"number of {rng.choice(PARTS)}"


def fact(rng: random.Random) -> str:
    return f"{attribute(rng)} of {city(rng)}"


def scramble(rng: random.Random) -> str:
    """A random string: letters, digits, or both."""
    alphabet = rng.choice(
        (string.ascii_lowercase, string.ascii_letters, string.digits, string.ascii_letters + string.digits)
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 9)))


def sum_text(rng: random.Random) -> str:
    return f"{number(rng)} {rng.choice('+-*')} {number(rng)}"


def thing(rng: random.Random) -> str:
    """Anything worth copying."""
    return rng.choices((pseudo_name, city, number, fact, scramble, sum_text), (2, 2, 3, 4, 1, 2))[0](rng)


def filler(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def fact_of_nobody(rng: random.Random) -> str:
    return f"{attribute(rng)} of {pseudo_name(rng)}"


def schema_text(rng: random.Random) -> str:
    """A JSON schema with made-up names: for the tokenizer's merges only, never read by the model."""
    name, key = syllable(rng), syllable(rng)
    return json.dumps(
        {
            "name": name,
            "description": filler(rng, 5),
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": rng.choice(("string", "number", "integer")), "description": filler(rng, 3)}
                },
                "required": [key],
                "additionalProperties": False,
            },
        }
    )


def tokenizer_texts(seed: int, count: int) -> Iterator[str]:
    """Text for learning merges: names are made up, so no city is a token of its own.

    Unlike `documents`, this holds the words of tool schemas, so that prompts are short; the model never reads it.
    """
    rng = random.Random(f"tokenizer/{seed}")
    tool_words = [SYSTEM, *(json.dumps(tool.as_openai()["function"]).replace(" of Paris", "") for tool in TOOLS)]
    for index in range(count):
        yield f"What is the {attribute(rng)} in the {rng.choice(ATTRIBUTES)} of {pseudo_name(rng)} plus {number(rng)}?"
        yield f"{rng.choice(('Add', 'Take', 'Multiply', 'Tell me'))} {filler(rng, 6)} minus times by the answer is N."
        yield json.dumps({rng.choice(("name", "key", "expression", "arguments")): {"key": fact_of_nobody(rng)}})
        yield json.dumps({"arguments": {"expression": sum_text(rng)}})
        yield "The answer is so. The first is. What Which How Add Take Repeat Say Copy List Here This That"
        yield "user\nassistant\nsystem\ntool\n<tools>\n</tools>\nerror: unknown key; known keys:"
        if index % 4 == 0:
            yield schema_text(rng)
            yield rng.choice(tool_words)


def distinct(make: Callable[[random.Random], str], count: int, rng: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


def turn(role: str, content: str) -> str:
    return f"{START}{role}\n{content}{END}\n"


def facts_in_prose(pairs: Sequence[tuple[str, str]], rng: random.Random) -> str:
    form = rng.choice(("The {0} is {1}.", "The {0} is {1}.", "{1} is the {0}.", "We say that the {0} was {1}."))
    return " ".join(form.format(*pair) for pair in pairs)


def some_pairs(rng: random.Random, most: int) -> list[tuple[str, str]]:
    """Facts with numbers. Often the same city or the same attribute comes twice, so a part is not enough to tell."""
    count = rng.randint(1, most)
    if rng.random() < 0.4:
        places = distinct(city, 2, rng)
        keys = distinct(lambda r: f"{attribute(r)} of {r.choice(places)}", count, rng)
    else:
        keys = distinct(fact, count, rng)
    return [(key, number(rng)) for key in keys]


def question(key: str, rng: random.Random) -> str:
    forms = (
        "What is the {}?",
        "What is the {}?",
        "Tell me the {}.",
        "Say the {}.",
        "How much is the {}?",
        "Find the {}.",
    )
    return rng.choice(forms).format(key)


# --- kinds of documents ---------------------------------------------------------------------------------------


def repeated_list(rng: random.Random) -> str:
    """A list, something in between, and the list again, two or three times."""
    items = [thing(rng) for _ in range(rng.randint(1, 8))]
    separator = rng.choice((", ", "; ", "\n", " ", " | ", " - ", '", "'))
    between = rng.choice(("\n", "\n\n", " = ", ". ", f". {filler(rng, rng.randint(1, 60))}. "))
    return between.join([separator.join(items)] * rng.randint(2, 3))


def echo_lines(rng: random.Random) -> str:
    """Lines that say one thing twice in a fixed frame, as in `x -> "x"`."""
    frames = (
        '{0} -> "{0}"',
        '"{0}": "{0}"',
        "Copy {0}: {0}",
        "{0} {0}",
        "The {0}\nis the {0}",
        '{{"text": "{0}"}} {0}',
    )
    frame = rng.choice(frames)
    make = rng.choice((thing, fact, number, pseudo_name, sum_text, scramble))
    return "\n".join(frame.format(make(rng)) for _ in range(rng.randint(2, 8)))


def pick_value(rng: random.Random) -> str:
    """A list of names with values, filler, then names out of it again, each with its value."""
    names = distinct(rng.choice((pseudo_name, fact, city, scramble)), rng.randint(2, 8), rng)
    make = rng.choice((number, number, pseudo_name, thing))
    values = {name: make(rng) for name in names}
    frame = rng.choice(("{}: {}", "{} = {}", "{}\t{}", "{} is {}", '"{}": "{}"', "{} ({})"))
    between = filler(rng, rng.choice((0, 0, 5, 20, 60)))
    asked = [rng.choice(names) for _ in range(rng.randint(1, 5))]
    parts = [frame.format(name, values[name]) for name in names]
    return "\n".join([*parts, between, *(frame.format(name, values[name]) for name in asked)])


def prose_then_json(rng: random.Random) -> str:
    """Facts in prose, then a JSON record of some of them."""
    pairs = some_pairs(rng, 4)
    text = facts_in_prose(pairs, rng) + rng.choice(("", " " + filler(rng, rng.randint(1, 30)) + "."))
    records = []
    for key, value in rng.sample(pairs, rng.randint(1, len(pairs))):
        name, _, place = key.rpartition(" of ")
        records.append(
            rng.choice(
                ({"record": key, "value": value}, {"city": place, name: value}, {"data": {"of": key}}, {key: value})
            )
        )
    return text + "\n" + "\n".join(json.dumps(record) for record in records)


def sums_of_facts(rng: random.Random) -> str:
    """Facts, then what to write down to combine two of them. The result is not worked out."""
    pairs = [*some_pairs(rng, 3), (f"{attribute(rng)} of {city(rng)}", number(rng))]
    (a, x), (b, y) = rng.sample(pairs, 2)
    n = number(rng)
    word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
    text = facts_in_prose(pairs, rng)
    if rng.random() < 0.5:
        return f"{text}\nThe {a} {word} the {b}: {x} {sign} {y}"
    return f"{text}\nThe {a} {word} {n}: {x} {sign} {n}"


def domain_prose(rng: random.Random) -> str:
    lines = []
    for _ in range(rng.randint(1, 4)):
        key, other, n = fact(rng), fact(rng), number(rng)
        lines.append(
            rng.choice(
                (
                    f"{question(key, rng)} The {key} is {n}.",
                    f"What is {n} {rng.choice(('plus', 'minus', 'times'))} {number(rng)}?",
                    f"What is the {key} {rng.choice(('plus', 'minus', 'times'))} the {other}?",
                    f"Add {n} to the {key}.",
                    f"Take {n} from the {key}.",
                    f"Multiply the {key} by the {other}.",
                    f"Many people say that the {key} is more than the {other}.",
                    f"The answer is {n}.",
                    sum_text(rng),
                )
            )
        )
    return rng.choice((" ", "\n")).join(lines)


def chat_repeat(rng: random.Random) -> str:
    """The user asks to repeat something; now and then several times in one chat."""
    ask = rng.choice(("Repeat: {}", "Say {}", "Copy this: {}", "Write {} again.", "{}", "Please say {} now."))
    turns = [turn("system", rng.choice((filler(rng, 6), "Repeat what the user says.")))] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        said = ", ".join(thing(rng) for _ in range(rng.randint(1, 3)))
        turns += [turn("user", ask.format(said)), turn("assistant", said)]
    return "".join(turns)


def chat_facts(rng: random.Random) -> str:
    """The user states facts and asks for some of them."""
    pairs = some_pairs(rng, 5)
    turns = [turn("system", filler(rng, rng.randint(2, 30)))] if rng.random() < 0.4 else []
    answer = rng.choice(("{1}", "The {0} is {1}.", "It is {1}.", "{0}: {1}", '{{"{0}": {1}}}'))
    told = facts_in_prose(pairs, rng)
    for _ in range(rng.randint(1, 3)):
        key, value = rng.choice(pairs)
        turns += [turn("user", f"{told} {question(key, rng)}".strip()), turn("assistant", answer.format(key, value))]
        told = ""
    return "".join(turns)


def sum_request(a: str, b: str, x: str, y: str, rng: random.Random) -> tuple[str, str]:
    """A request to combine `a` and `b`, and the sum to write down when their values are `x` and `y`."""
    forms = (
        (f"What is {a} plus {b}?", f"{x} + {y}"),
        (f"Add {b} to {a}.", f"{x} + {y}"),
        (f"What is {a} minus {b}?", f"{x} - {y}"),
        (f"Take {b} from {a}.", f"{x} - {y}"),
        (f"What is {a} times {b}?", f"{x} * {y}"),
        # What is looked up comes first in the sum, then what the request names first.
        (f"Multiply {b} by {a}." if b == y else f"Multiply {a} by {b}.", f"{x} * {y}"),
    )
    return rng.choice(forms)


def chat_sums(rng: random.Random) -> str:
    """The user asks to combine facts and numbers; the assistant writes the sum down. The facts come before the request
    or after it, and the result is not worked out."""
    turns = [turn("system", filler(rng, rng.randint(2, 60)))] if rng.random() < 0.6 else []
    for _ in range(rng.randint(1, 3)):
        pairs = some_pairs(rng, 3)
        (a, x), (b, y) = pairs[0], rng.choice([*pairs[1:], *[(number(rng),) * 2] * 2])
        of_a, of_b = f"the {a}", b if b == y else f"the {b}"
        if rng.random() < 0.15:
            of_a, x = (number(rng),) * 2
        request, written = sum_request(of_a, of_b, x, y, rng)
        told = facts_in_prose(rng.sample(pairs, len(pairs)), rng)
        if rng.random() < 0.5:
            turns += [turn("user", f"{told} {request}"), turn("assistant", written)]
        else:
            turns += [turn("user", request), turn("assistant", f"What is known of the {a}?")]
            turns += [turn("user", told), turn("assistant", written)]
    return "".join(turns)


def chat_errand(rng: random.Random) -> str:
    """The assistant asks for the facts of a request, one after another and in its order, and is told each; then it
    writes down what was wanted. Nothing is worked out."""
    turns = [turn("system", filler(rng, rng.randint(2, 60)))] if rng.random() < 0.6 else []
    ask = rng.choice(("What is the {}?", "{}", "The {}?", '"{}"', '{{"record": "{}"}}', '{{"find": {{"what": "{}"}}}}'))
    tell = rng.choice(("{}", "{}", "It is {}.", "= {}", '"{}"'))
    write = rng.choice(("{}", "{}", '"{}"', '{{"sum": "{}"}}', '{{"write": {{"sum": "{}"}}}}'))
    for _ in range(rng.choice((1, 1, 2))):
        pairs = some_pairs(rng, 3)
        request, wanted, pairs = errand_request(pairs, rng)
        turns.append(turn("user", request))
        for key, value in pairs:
            turns += [turn("assistant", ask.format(key)), turn("user", tell.format(value))]
        turns.append(turn("assistant", write.format(wanted)))
    return "".join(turns)


def errand_request(pairs: list[tuple[str, str]], rng: random.Random) -> tuple[str, str, list[tuple[str, str]]]:
    """A request that needs some of the facts, what to write down in the end, and the facts in the request's order."""
    if len(pairs) == 1 or rng.random() < 0.25:
        (key, value), n = pairs[0], number(rng)
        if rng.random() < 0.3:
            return question(key, rng), value, pairs[:1]
        request, wanted = sum_request(f"the {key}", n, value, n, rng)
        return request, wanted, pairs[:1]
    if rng.random() < 0.25:
        between = rng.choice((", the ", " and the ", ", then the "))
        return f"Tell me the {between.join(key for key, _ in pairs)}.", ", ".join(value for _, value in pairs), pairs
    (a, x), (b, y) = pairs[:2]
    if rng.random() < 0.5:
        word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*")))
        return f"What is the {a} {word} the {b}?", f"{x} {sign} {y}", pairs[:2]
    forms = (
        (f"Add the {a} to the {b}.", f"{x} + {y}"),
        (f"Take the {a} from the {b}.", f"{y} - {x}"),
        (f"Multiply the {a} by the {b}.", f"{x} * {y}"),
    )
    return *rng.choice(forms), pairs[:2]


def list_with_remarks(rng: random.Random) -> str:
    """A list, then its items one after another with something else after each: what comes next is found in the list."""
    make = rng.choice((fact, fact, thing, pseudo_name))
    items = distinct(make, rng.randint(2, 5), rng)
    remark = rng.choice((number, number, pseudo_name, lambda r: filler(r, r.randint(1, 8))))
    frame = rng.choice(("- {}", "{}:", "{} =", '"{}":', '{{"item": "{}"}}', "Now {}."))
    lines = [rng.choice((", ", "; ", " and ", " plus the ", " to the ", "\n")).join(items)]
    for item in items:
        lines.append(f"{frame.format(item)}{rng.choice((' ', chr(10)))}{remark(rng)}")
    return "\n".join(lines)


KINDS: tuple[tuple[int, Callable[[random.Random], str]], ...] = (
    (3, repeated_list),
    (3, echo_lines),
    (3, pick_value),
    (3, prose_then_json),
    (2, sums_of_facts),
    (2, domain_prose),
    (2, chat_repeat),
    (3, chat_facts),
    (6, chat_sums),
    (10, chat_errand),
    (4, list_with_remarks),
)


def documents(seed: int) -> Iterator[str]:
    """Endless documents of 10 to about 500 tokens; the same seed gives the same ones."""
    rng = random.Random(f"documents/{seed}")
    weights, makers = zip(*KINDS, strict=True)
    while True:
        yield rng.choices(makers, weights)[0](rng)


def copy_probes(seed: int, count: int) -> Iterator[tuple[str, str, str]]:
    """(kind, prompt, answer) where the answer stands in the prompt; `count` of each kind, on held-out cities."""
    rng = random.Random(f"probes/{seed}")
    for _ in range(count):
        where = rng.sample(CITIES["heldout"], 3)
        keys = [f"{rng.choice(ATTRIBUTES)} of {place}" for place in where]
        values = [number(rng) for _ in where]
        told = " ".join(f"The {key} is {value}." for key, value in zip(keys, values, strict=True))
        pick = rng.randrange(3)
        for kind, said in (("city", keys[0]), ("number", values[0]), ("string", scramble(rng))):
            yield kind, turn("user", f"Repeat: {said}") + f"{START}assistant\n", said + END
        asked = turn("system", filler(rng, 80)) + turn("user", f"{told} What is the {keys[pick]}?")
        yield "chosen", asked + f"{START}assistant\nThe {keys[pick]} is", f" {values[pick]}.{END}"
        yield "json", f'{told} {filler(rng, 40)}\n{{"record": "{keys[pick]}", "value": "', f'{values[pick]}"}}'
