"""The same rendering with other contents, without running the template again.

Most templates copy contents as they are, so what they write around them is the same whatever the contents say. It is
kept as a skeleton, by the shape of the conversation, and the contents are put in their places: a tenth of the time.
Whether a template does that is tried when it is opened; one that looks into contents is rendered each time.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from data.guard import END, START, Guard
from data.template_reading import may_look_inside
from envs.types import Message, ToolSpec

if TYPE_CHECKING:
    from data.chat_template import Writing

# Longer histories come once: they are rendered.
_MAX_MESSAGES, _MAX_KEPT = 8, 256
_PLACE = re.compile(f"{START}place (\\d+){END}")
_TRIED = (
    "What is 12?",
    "naïve, nai\u0308ve, 日本, 👩\u200d👩",
    '{"x": ["y", null], "n": 1.50}',
    '[{"type": "text", "text": "It\'s <&>"}]',
    "one:\n\n\ttwo,  three.\\n" + " One more word." * 60,
)


class Render(Protocol):
    """How `ChatTemplate` renders."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, writing: Writing, generation_prompt: bool
    ) -> str: ...


class Skeletons:
    """Renders guarded conversations by filling in what was rendered before."""

    def __init__(self, render: Render, guard: Guard) -> None:
        self._render = render
        self._guard = guard
        self._kept: dict[Hashable, str] = {}

    @classmethod
    def of(
        cls, render: Render, guard: Guard, source: str, chats: Sequence[Sequence[Message]], writing: Writing
    ) -> Skeletons | None:
        """None where the template may write something else around another content.

        Args:
            source: the template.
            chats: conversations of all shapes that it writes.
        """
        if may_look_inside(source):
            return None
        skeletons = cls(render, guard)
        for chat in chats:
            for content in _TRIED:
                said = [
                    message if message.role == "assistant" else replace(message, content=content) for message in chat
                ]
                whole = render(said, (), writing=writing, generation_prompt=True)
                if skeletons.render(said, (), writing=writing, generation_prompt=True) != whole:
                    return None
        return skeletons

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, writing: Writing, generation_prompt: bool
    ) -> str:
        """As `ChatTemplate.render`, with its errors."""
        shape = _shape(messages)
        if shape is None:
            return self._render(messages, tools, writing=writing, generation_prompt=generation_prompt)
        tools = tuple(tools)
        # Tools that are equal may be written differently: 1 and True, keys in another order.
        key = (shape, repr(tools), id(writing), generation_prompt)
        text = self._kept.get(key)
        if text is None:
            named = [
                message if message.role == "assistant" else replace(message, content=f"place {number}")
                for number, message in enumerate(messages)
            ]
            text = self._render(named, tools, writing=writing, generation_prompt=generation_prompt)
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = text
        return _PLACE.sub(lambda found: self._guard.mark(messages[int(found[1])].content), text)


def _shape(messages: Sequence[Message]) -> Hashable:
    """What a rendering depends on but the contents; None where it may depend on them: a template trims blanks at their
    ends and leaves out empty ones."""
    if len(messages) > _MAX_MESSAGES:
        return None
    shape: list[Hashable] = []
    for message in messages:
        if message.role == "assistant":
            # A short one of our own, as a rule; it is part of the skeleton.
            shape.append(repr(message))
        elif not message.content or message.content != message.content.strip():
            return None
        else:
            shape.append((message.role, message.call_id))
    return tuple(shape)
