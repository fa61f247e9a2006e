"""What a chat template does with thinking, and with turns that lie behind: does it write them as they were sampled?

Left out: what is done about it (`data/template_renderer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from data.chat_template import ASKED, TRIED_TOOL, ChatTemplate
from data.guard import END, START, Guard
from data.turn_ends import Kind, TurnEnd, answers_to, dummy_turn, sampled_text
from envs.types import Message

_CALL_IDS = ("call_0",)


class Thought(StrEnum):
    """What a turn holds of thinking."""

    NONE = "none"
    EMPTY = "empty"
    """The markers, and nothing between them."""
    SOME = "some"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """closing: the control token (or the text) that ends a turn's thinking. in_prompt: the generation prompt has opened
    it already."""

    closing: str
    in_prompt: bool


def find_thinking(template: ChatTemplate, guard: Guard, prompt: str) -> ThinkingMarks | None:
    """How the template writes thinking; None: it writes none.

    Args:
        prompt: the rendering of `ASKED` with the generation prompt, guarded.
    """
    plain_prompt = guard.plain(prompt).rstrip()
    for turn in (dummy_turn(()), dummy_turn(_CALL_IDS)):
        thinking = replace(turn, thinking="So.")
        try:
            text = template.render([ASKED, thinking], (), writing=template.framed, generation_prompt=False)
        except ValueError:  # some templates write thinking in turns with calls only
            continue
        head = START.join(text.split(START)[:2])  # up to the thinking, the second text
        closing = text.split(END)[2].split(START)[0]
        placed = guard.controls(closing)
        return ThinkingMarks(
            closing=placed[0][1] if placed else closing.strip(), in_prompt=guard.plain(head).rstrip() == plain_prompt
        )
    # Some templates open it and read it out of the content.
    return ThinkingMarks(closing="</think>", in_prompt=True) if plain_prompt.endswith("<think>") else None


def is_rewritten(template: ChatTemplate, end: TurnEnd, kind: Kind, thought: Thought) -> bool:
    """Whether the template writes a prompt and a turn of that kind otherwise once the answer to it has come."""
    turn = dummy_turn(() if kind is Kind.ANSWER or template.no_calls else _CALL_IDS)
    if thought is Thought.SOME and template.dialect.thinking:
        turn = replace(turn, thinking="So.")
    chat = [ASKED, turn, *answers_to(kind, _CALL_IDS)]
    # Some templates move the tools to the last user message.
    tools = () if template.no_tools else (TRIED_TOOL,)
    try:
        prompt = template.render([ASKED], tools, writing=template.guarded, generation_prompt=True)
        later = template.render(chat, tools, writing=template.guarded, generation_prompt=True)
        said = "" if thought is Thought.NONE else sampled_text(template, turn, prompt, end, tools)
    except ValueError:  # the template has no such turn
        return thought is not Thought.NONE and is_rewritten(template, end, kind, Thought.NONE)
    return end.stop != end.closing or not later.startswith(prompt + said) or _drops_a_text(template, chat)


def _drops_a_text(template: ChatTemplate, chat: list[Message]) -> bool:
    """Such as the thinking of a turn, even of a last one."""
    try:
        template.render(chat, (), writing=template.framed, generation_prompt=True)
    except ValueError:
        return True
    return False
