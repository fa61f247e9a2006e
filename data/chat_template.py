"""A Jinja chat template: in which form it wants its messages, and the text it makes of them.

Templates differ in where they look for thinking, in whether contents are texts or lists of parts, arguments objects or
JSON texts, call ids free or nine letters. What a template wants is found by trying: the first form in which everything
that was handed in comes out again.

Left out: what the text means as tokens, and where turns end in it (`data/template_renderer.py`).
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from data.guard import END, START, Guard
from data.template_skeleton import Skeletons
from envs.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Write = Callable[[str], str]

ASKED = Message(role="user", content="Do it.")
TRIED_CALL = ToolCall(call_id="call_0", name="f", arguments={"x": "a"})
TRIED_TOOL = ToolSpec(
    name="f", description="Does x.", parameters={"type": "object", "properties": {"x": {"type": "string"}}}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The form in which a template takes messages.

    parts: contents are lists of `{"type": "text", "text": …}`.
    thinking: the key of an assistant's thinking; None: the template writes none.
    arguments_as_text: call arguments are JSON texts, not objects.
    null_content: the content of a turn that says nothing but calls is None; some templates write calls only then.
    short_call_ids: call ids must have nine letters and digits.
    """

    parts: bool = False
    thinking: str | None = None
    arguments_as_text: bool = False
    null_content: bool = False
    short_call_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How texts are handed to the template: those of others (system, user, tool), those of an assistant turn (prose,
    thinking, argument values), and names, keys, ids and tool descriptions."""

    content: Write
    turn: Write
    other: Write


def as_it_is(text: str) -> str:
    return text


NATIVE = Writing(content=as_it_is, turn=as_it_is, other=as_it_is)
"""Unguarded, as anybody would render; for comparison alone."""


class ChatTemplate:
    """Renders conversations with a tokenizer's template, in the dialect that the template wants.

    `no_system`, `no_tools`, `no_calls` and `no_results` say why the template cannot write a system message, tools, an
    assistant's calls of them, or their results; None: it can.

    Args:
        name: what error messages call the model.
        enable_thinking: passed to the template unless None.

    Raises:
        ValueError: there is no template, or it cannot write a user message.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, guard: Guard, *, name: str, enable_thinking: bool | None
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(f"model {name}: no chat template; add chat_template.jinja to the model folder")
        self._tokenizer = tokenizer
        self._skeletons: Skeletons | None = None
        self.name = name
        self.source = str(tokenizer.chat_template)
        self._options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.guarded = Writing(content=guard.mark, turn=guard.escape, other=guard.escape)
        """Contents are marked. An assistant's own text is not: templates cut it at its thinking."""
        self.framed = Writing(content=guard.mark, turn=guard.mark, other=guard.escape)
        """An assistant turn of ours, all of whose texts are marked, to see where it ends."""
        self.dialect = self._content_dialect()
        self.no_system = self._why_not([Message(role="system", content="Be brief."), ASKED])
        self.no_calls = self._try_calls()
        self.no_results = self._try_results()
        self.no_tools = self._try_tools()
        self.dialect = replace(self.dialect, thinking=self._thinking_key())
        self._skeletons = Skeletons.of(self._render, guard, self.source, self._tried_chats(), self.guarded)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        writing: Writing,
        generation_prompt: bool,
        **options: Any,
    ) -> str:
        """The text that the template makes of a conversation.

        Raises:
            ValueError: the template fails; or it drops or repeats a content.
        """
        if writing is NATIVE or options or self._skeletons is None:
            return self._render(messages, tools, writing=writing, generation_prompt=generation_prompt, **options)
        return self._skeletons.render(messages, tools, writing=writing, generation_prompt=generation_prompt)

    def _tried_chats(self) -> list[list[Message]]:
        """Conversations of all shapes that the template writes."""
        chats = [[ASKED]]
        if self.no_system is None:
            chats.append([Message(role="system", content="Be brief."), ASKED])
        if self.no_results is None:
            calls = () if self.no_calls else (TRIED_CALL,)
            turn = Message(role="assistant", content="" if calls else "Done.", tool_calls=calls)
            chats.append([ASKED, turn, Message(role="tool", content="7", call_id=TRIED_CALL.call_id)])
        return chats

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        writing: Writing,
        generation_prompt: bool,
        **options: Any,
    ) -> str:
        rows = [self._row(message, writing) for message in messages]
        specs: list[Any] = [_written(tool.as_openai(), writing.other) for tool in tools]
        try:
            text = self._tokenizer.apply_chat_template(
                rows,
                tools=specs or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._options,
                **options,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(message.role for message in messages)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"model {self.name}: its chat template fails on a conversation of {roles}: {reason}; mend "
                "chat_template.jinja in the model folder"
            ) from error
        assert isinstance(text, str)
        self._check_marks(text, messages, writing)
        return text

    def _check_marks(self, text: str, messages: Sequence[Message], writing: Writing) -> None:
        """Every content must come out once."""
        if writing is NATIVE:
            return
        expected = sum(
            bool(text.strip()) for message in messages for text in marked_texts(message, writing is self.framed)
        )
        starts, ends = text.count(START), text.count(END)
        if not starts == ends == expected:
            what = "drops" if min(starts, ends) < expected else "repeats"
            roles = ", ".join(message.role for message in messages)
            raise ValueError(
                f"model {self.name}: its chat template {what} contents: of {expected} in a conversation of {roles} it "
                f"writes {min(starts, ends)}"
            )

    def _row(self, message: Message, writing: Writing) -> dict[str, Any]:
        """The message as the template gets it."""
        dialect = self.dialect
        write = writing.turn if message.role == "assistant" else writing.content
        content: Any = write(message.content)
        if dialect.parts:
            content = [{"type": "text", "text": content}]
        row: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking and dialect.thinking:
            row[dialect.thinking] = writing.turn(message.thinking)
        if message.tool_calls:
            row["content"] = None if dialect.null_content and not message.content else content
            row["tool_calls"] = [
                {
                    "type": "function",
                    "id": self._call_id(call.call_id, writing),
                    "function": {"name": writing.other(call.name), "arguments": self._arguments(call, writing)},
                }
                for call in message.tool_calls
            ]
        if message.call_id is not None:
            row["tool_call_id"] = self._call_id(message.call_id, writing)
        return row

    def _call_id(self, call_id: str, writing: Writing) -> str:
        if not self.dialect.short_call_ids or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
            return writing.other(call_id)
        return short_call_id(call_id)

    def _arguments(self, call: ToolCall, writing: Writing) -> Any:
        """One form for all: the object. A JSON text that stands for one is read; one that cannot be read stays as it
        is, and so it is written."""
        arguments: Any = call.arguments
        if isinstance(arguments, str):
            try:
                decoded = json.loads(arguments)
            except ValueError:
                return writing.other(arguments)
            if not isinstance(decoded, dict):
                return writing.other(arguments)
            arguments = decoded
        written = {writing.other(key): _written(value, writing.turn, writing.other) for key, value in arguments.items()}
        return json.dumps(written, ensure_ascii=False) if self.dialect.arguments_as_text else written

    def _content_dialect(self) -> Dialect:
        """Contents as texts, or as lists of parts."""
        failures = []
        for parts in (False, True):
            self.dialect = Dialect(parts=parts)
            try:
                self.render([ASKED], (), writing=self.guarded, generation_prompt=True)
            except ValueError as error:
                failures.append(error)
            else:
                return self.dialect
        raise failures[0]

    def _thinking_key(self) -> str | None:
        plain = self.dialect
        for key in ("reasoning_content", "thinking", "reasoning"):
            self.dialect = replace(plain, thinking=key)
            answer = Message(role="assistant", thinking="So.", content="Done.")
            # Some write it before calls alone.
            calls = Message(role="assistant", thinking="So.", tool_calls=() if self.no_calls else (TRIED_CALL,))
            if self._writes([ASKED, answer]) or (calls.tool_calls and self._writes([ASKED, calls])):
                return key
        return None

    def _try_calls(self) -> str | None:
        """Find the form of calls; or why none is written."""
        plain = self.dialect
        chat = [ASKED, Message(role="assistant", tool_calls=(TRIED_CALL,))]
        answered = [*chat, Message(role="tool", content="7", call_id=TRIED_CALL.call_id)]
        # A template that has no tool messages may write calls all the same.
        either = (False, True)
        for conversation, as_text, null, short in product((answered, chat), either, either, either):
            self.dialect = replace(plain, arguments_as_text=as_text, null_content=null, short_call_ids=short)
            if self._writes(conversation):
                return None
        self.dialect = plain
        return self._why_not(chat)

    def _try_results(self) -> str | None:
        """Tool messages behind calls; or, where the template writes no calls, behind what the model said."""
        turn = (
            Message(role="assistant", content="Done.")
            if self.no_calls
            else Message(role="assistant", tool_calls=(TRIED_CALL,))
        )
        return self._why_not([ASKED, turn, Message(role="tool", content="7", call_id=TRIED_CALL.call_id)])

    def _try_tools(self) -> str | None:
        texts = [
            self.render([ASKED], tools, writing=self.guarded, generation_prompt=True) for tools in ((), (TRIED_TOOL,))
        ]
        return None if texts[0] != texts[1] else f"model {self.name}: its chat template writes no tools"

    def _writes(self, messages: Sequence[Message]) -> bool:
        return self._why_not(messages) is None

    def _why_not(self, messages: Sequence[Message]) -> str | None:
        try:
            self.render(messages, (), writing=self.framed, generation_prompt=messages[-1].role != "assistant")
        except ValueError as error:
            return str(error)
        return None


def marked_texts(message: Message, with_turns: bool) -> Iterable[str]:
    """The texts of a message that are marked when it is written."""
    if message.role != "assistant":
        return [message.content]
    if not with_turns:
        return []
    values = [value for call in message.tool_calls for value in call.arguments.values()]
    return [message.thinking, message.content, *(value for value in values if isinstance(value, str))]


def short_call_id(call_id: str) -> str:
    """Nine letters and digits that stand for any id, the same ones each time.

    >>> short_call_id("call_0") == short_call_id("call_0"), len(short_call_id("call_0"))
    (True, 9)
    """
    letters = string.ascii_letters + string.digits
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest(), "big")
    return "".join(letters[number // len(letters) ** place % len(letters)] for place in range(9))


def _written(value: Any, write: Write, write_key: Write | None = None) -> Any:
    """A JSON value with its texts as they are handed in, keys included."""
    key_of = write_key or write
    if isinstance(value, str):
        return write(value)
    if isinstance(value, Mapping):
        return {key_of(str(key)): _written(item, write, key_of) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item, write, key_of) for item in value]
    return value
