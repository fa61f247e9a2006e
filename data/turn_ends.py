"""Where an assistant's turn ends in a chat template's text, and what the template makes of it later.

Everything is read off short conversations whose texts are marked: what follows the last mark of a turn, alone and with
messages after it.

    alone        …⟦Done.⟧<|im_end|>\\n                          the turn's closing, and what the template adds
    continued    …⟦Done.⟧<|im_end|>\\n<|im_start|>user\\n⟦…⟧…      the closing again, and the bridge

Left out: ids, and the contents of real conversations (`data/template_renderer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from data.chat_template import ASKED, TRIED_CALL, ChatTemplate
from data.guard import END, START, Guard
from data.tool_formats.base import CallError
from envs.types import Message, ToolCall, ToolSpec

_UNNAMED = "unknown"
"""What heads the result of a call that could not be read."""


class Kind(StrEnum):
    """What a turn is, and what answers it."""

    ANSWER = "answer"
    """Prose; a user message follows."""
    CALLS = "calls"
    """Tool calls; tool messages follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a turn of one kind ends.

    stop: the control token that a policy ends it with.
    closing: the one that stands there once messages follow; it differs where the template rewrites it.
    after: what the template writes behind a last turn, which nobody samples.
    opens_next: no token ends a turn; the stop is the beginning of the next message (GLM).
    """

    stop: str
    closing: str
    after: str
    opens_next: bool = False


def dummy_turn(call_ids: Sequence[str], names: Sequence[str] = ()) -> Message:
    """An assistant turn to be followed by tool messages with these ids; without ids, one that answers."""
    if not call_ids:
        return Message(role="assistant", content="Done.")
    called = [*names, *[TRIED_CALL.name] * (len(call_ids) - len(names))]
    calls = (
        ToolCall(call_id=call_id, name=name, arguments=TRIED_CALL.arguments)
        for call_id, name in zip(call_ids, called, strict=True)
    )
    return Message(role="assistant", tool_calls=tuple(calls))


def answered_calls(call_ids: Sequence[str], calls: Sequence[ToolCall | CallError]) -> tuple[list[str], list[str]]:
    """The calls of a turn that these results answer, in the turn's order: their ids and names. Where it has not all of
    those ids, the results are in the order of its calls.

    >>> f, g = ToolCall(call_id="a", name="f", arguments={}), ToolCall(call_id="b", name="g", arguments={})
    >>> answered_calls(["b", "a"], [f, g]), answered_calls(["x", "y"], [f])
    ((['a', 'b'], ['f', 'g']), (['x', 'y'], ['f', 'unknown']))
    """
    names = {call.call_id: call.name if isinstance(call, ToolCall) else _UNNAMED for call in calls}
    if len({*call_ids}) == len(call_ids) and names.keys() >= {*call_ids}:
        answered = [call_id for call_id in names if call_id in call_ids]
        return answered, [names[call_id] for call_id in answered]
    return list(call_ids), [*names.values(), *[_UNNAMED] * len(call_ids)][: len(call_ids)]


def answers_to(kind: Kind, call_ids: Sequence[str]) -> list[Message]:
    if kind is Kind.ANSWER:
        return [Message(role="user", content="Go on.")]
    return [Message(role="tool", content="7", call_id=call_id) for call_id in call_ids]


def after_turn(
    template: ChatTemplate,
    turn: Message,
    following: Sequence[Message] | None,
    *,
    before: Sequence[Message] = (),
    **options: Any,
) -> str:
    """What the template writes after the last text of `turn` when `following` comes next, and then the header of the
    turn to be sampled; None: nothing comes next."""
    chat = [ASKED, *before, turn, *(following or ())]
    text = template.render(chat, (), writing=template.framed, generation_prompt=following is not None, **options)
    contents = sum(bool(message.content.strip()) for message in following or ())
    parts = text.split(END)
    return END.join(parts[len(parts) - 1 - contents :])


def find_end(template: ChatTemplate, guard: Guard, kind: Kind, call_ids: Sequence[str], **options: Any) -> TurnEnd:
    """The end of a turn (with so many calls), by comparing what follows it alone and continued.

    Raises:
        ValueError: no control token ends it; or the template fails.
    """
    # A template without calls may write tool messages all the same, behind whatever was sampled.
    turn = dummy_turn(() if template.no_calls else call_ids)
    alone = after_turn(template, turn, None, **options)
    continued = after_turn(template, turn, answers_to(kind, call_ids), **options)
    of_alone, of_continued = guard.controls(alone), guard.controls(continued)
    inside = _inside_turn(template, guard, turn, **options)
    common = 0
    while _same_up_to(alone, of_alone, continued, of_continued, common):
        common += 1
    if common and of_alone[common - 1][1] not in inside:
        place, stop = of_alone[common - 1]
        return TurnEnd(stop=stop, closing=stop, after=alone[place + len(stop) :])
    if common < min(len(of_alone), len(of_continued)):
        # Something closes the turn in both, but not the same token: the template rewrites it.
        (place, stop), (_, closing) = of_alone[common], of_continued[common]
        return TurnEnd(stop=stop, closing=closing, after=alone[place + len(stop) :])
    rest = alone[of_alone[-1][0] + len(of_alone[-1][1]) :] if of_alone else alone
    if common == len(of_alone) < len(of_continued) and not rest.strip():
        stop = of_continued[common][1]
        return TurnEnd(stop=stop, closing=stop, after="", opens_next=True)
    raise ValueError(
        f"model {template.name}: its chat template ends assistant turns with {guard.plain(alone)[:40]!r}, which holds "
        "none of the tokenizer's added tokens; no turn could be stopped"
    )


def depends_on_history(template: ChatTemplate, kind: Kind, call_ids: Sequence[str]) -> bool:
    """Whether what follows a turn is another text when such a turn, and its answer, came before."""
    turn, answers = dummy_turn(() if template.no_calls else call_ids), answers_to(kind, call_ids)
    first, second = (after_turn(template, turn, answers, before=before) for before in ((), (turn, *answers)))
    return first != second


def moves_prose(template: ChatTemplate, call_ids: Sequence[str]) -> bool:
    """Whether what a turn says beside its calls comes to stand behind their results, where no policy samples it: so
    Gemma 4's templates write it."""
    turn, answers = replace(dummy_turn(call_ids), content="Done."), answers_to(Kind.CALLS, call_ids)
    text = template.render([ASKED, turn, *answers], (), writing=template.framed, generation_prompt=False)
    return text.rpartition(START)[2].partition(END)[0] == turn.content


def _inside_turn(template: ChatTemplate, guard: Guard, turn: Message, **options: Any) -> set[str]:
    """The control tokens between the texts of a turn: they go on with it, so none of them ends it."""
    text = template.render([ASKED, turn], (), writing=template.framed, generation_prompt=False, **options)
    first = text.find(END, text.find(END) + 1)
    return {token for place, token in guard.controls(text) if first < place < text.rfind(END)}


def _same_up_to(
    first: str, of_first: list[tuple[int, str]], second: str, of_second: list[tuple[int, str]], index: int
) -> bool:
    """Whether two texts are the same up to and with their control token `index`."""
    if index >= min(len(of_first), len(of_second)) or of_first[index] != of_second[index]:
        return False
    end = of_first[index][0] + len(of_first[index][1])
    return first[:end] == second[:end]


def sampled_text(
    template: ChatTemplate, message: Message, prompt: str, end: TurnEnd, tools: Sequence[ToolSpec] = ()
) -> str:
    """The template's own text of a turn, guarded, as a policy would sample it after `prompt` (the rendering of `ASKED`
    and `tools` with the generation prompt): up to and with its stop token.

    Raises:
        ValueError: the template's own turns do not begin as its generation prompt does, or end otherwise.
    """
    text = template.render([ASKED, message], tools, writing=template.guarded, generation_prompt=False)
    thought = "with" if message.thinking else "without"
    if not text.startswith(prompt):
        raise ValueError(
            f"model {template.name}: its chat template writes a turn {thought} thinking in a form that does not begin "
            "with its generation prompt, so no policy could sample it; set enable_thinking, or give the turn thinking"
        )
    said = text[len(prompt) :]
    if end.opens_next:
        return said + end.stop
    if not said.endswith(end.stop + end.after):
        raise ValueError(f"model {template.name}: its chat template does not end this turn with {end.stop!r}")
    return said.removesuffix(end.after)
