"""A renderer for any Jinja chat template: prompts, bridges and stop tokens derived from the template itself.

    opening    render(conversation, generation prompt)                          every id PROMPT
    bridge     render(. , dummy turn, new messages, generation prompt)          what follows the dummy's end of turn:
               its contents TOOL, the rest TEMPLATE
    turn_ids   render(. , turn) without render(. , generation prompt)           up to and with the stop token

All of it goes through the guard, so that no text becomes a control token, and the ids of texts that spell none are the
native ones. Sampled ids are never made again: the bridge of a dummy turn is appended to what was sampled. What a
template rewrites when the conversation goes on (thinking that it drops, mostly) is found out at start-up, and so is
whether prompts, bridges and turns are those of the native rendering, and whether the calls that the template writes are
read (`data/template_check.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from data.chat import Thinking
from data.chat_template import ASKED, ChatTemplate
from data.guard import START, Guard, GuardedToken
from data.template_check import check_renderer, read_past_turn, unread_turn
from data.template_description import describe
from data.tool_formats.base import ParsedTurn, ToolFormat
from data.tool_formats.detect import detect_tool_format
from data.tool_formats.turn import THINKING_OPENERS
from data.turn_ends import (
    Kind,
    TurnEnd,
    after_turn,
    answered_calls,
    depends_on_history,
    dummy_turn,
    find_end,
    moves_prose,
    sampled_text,
)
from data.turn_history import Thought, find_thinking, is_rewritten
from data.types import FinishReason, Segment, Source
from envs.types import Message, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TWO_CALLS = ("call_0", "call_1")
_DEPENDS_ON_HISTORY = "its chat template depends on the turns before in what it writes around"


class TemplateRenderer:
    """A renderer made from a tokenizer's own chat template.

    Args:
        tokenizer: a fast tokenizer with a `chat_template`.
        name: what error messages call the model.
        tool_format: how the model writes calls; unless given, as its template does. Where it does not read the calls
            that the template writes, tools, turns with calls and results are refused (`no_reading` says why).
        thinking: `keep`: a stream only grows. `follow`: where the template would rewrite what came before, `bridge`
            gives None, and a new stream starts.
        enable_thinking: passed to the template unless None.

    Raises:
        ValueError: there is no template, it fails, no token ends its turns, or its ids cannot be followed.
    """

    name = "template"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        tool_format: ToolFormat | None = None,
        thinking: Thinking = "keep",
        enable_thinking: bool | None = None,
    ) -> None:
        self.model = name
        self._tokenizer = tokenizer
        self._thinking: Thinking = thinking
        self._guard = Guard(tokenizer)
        self.control_tokens: Mapping[int, str] = self._guard.control_tokens
        self._token_ids = {text: token_id for token_id, text in self.control_tokens.items()}
        self.template = ChatTemplate(tokenizer, self._guard, name=name, enable_thinking=enable_thinking)
        self.tool_format = tool_format or detect_tool_format(self.template.source, self.control_tokens.values())
        self._learn_turns()
        self._learn_history()
        self.no_reading: str | None = None
        self.no_reading = self._try_reading()
        self.description = describe(self, thinking)
        check_renderer(self, tokenizer)

    def _learn_turns(self) -> None:
        """What ends a turn that answers, and one that calls."""
        self.ends = {Kind.ANSWER: find_end(self.template, self._guard, Kind.ANSWER, ())}
        if depends_on_history(self.template, Kind.ANSWER, ()):
            raise ValueError(f"model {self.model}: {_DEPENDS_ON_HISTORY} a user message")
        self.no_results, self.several_calls = self.template.no_results, False
        self.moves_prose = False
        stops = [self.ends[Kind.ANSWER].stop]
        if self.no_results is None:
            self.no_results = self._learn_calls(stops)
        self.stop_token_ids = tuple(dict.fromkeys(self._token_ids[stop] for stop in stops))

    def _learn_calls(self, stops: list[str]) -> str | None:
        """What ends a turn with calls is added to `stops`; or the reason why the template cannot answer one."""
        ends: dict[tuple[str, ...], TurnEnd] = {}
        for call_ids in (_TWO_CALLS[:1], _TWO_CALLS):
            with suppress(ValueError):  # there are templates for one call a turn
                ends[call_ids] = find_end(self.template, self._guard, Kind.CALLS, call_ids)
        if not ends:
            return f"model {self.model}: its chat template ends turns with calls in no token of their own"
        call_ids, end = list(ends.items())[-1]
        one = ends.get(_TWO_CALLS[:1], end)
        # Of a turn with two calls it is known which tokens go on with it, and so do not end it.
        if one != end and not end.opens_next:
            return (
                f"model {self.model}: its chat template ends a turn of one call with {one.stop!r}, of two with "
                f"{end.stop!r}"
            )
        if depends_on_history(self.template, Kind.CALLS, call_ids):
            return f"model {self.model}: {_DEPENDS_ON_HISTORY} a tool result"
        self.ends[Kind.CALLS] = end
        self.several_calls = len(ends) == 2 and self.template.no_calls is None
        stops.append(end.stop)
        # Llama 3's template ends calls with another token where it knows built-in tools, and so may the model.
        with suppress(ValueError):
            stops.append(find_end(self.template, self._guard, Kind.CALLS, call_ids, builtin_tools=[]).stop)
        return None

    def _learn_history(self) -> None:
        """What the template does to what lies behind, and what it needs to know of it."""
        self._prompt_text = self._render([ASKED])
        self._prompt = self._encode(self._prompt_text)
        self._marks = find_thinking(self.template, self._guard, self._prompt_text)
        self.rewrites = {
            (kind, thought): is_rewritten(self.template, end, kind, thought)
            for kind, end in self.ends.items()
            for thought in Thought
        }
        self._names_matter = self.takes_user_after_results = False
        if Kind.CALLS in self.ends and self.template.no_calls is None:
            result = Message(role="tool", content="7", call_id=_TWO_CALLS[0])
            named = [dummy_turn(_TWO_CALLS[:1], [name]) for name in ("f", "g")]
            self._names_matter = len({after_turn(self.template, turn, [result]) for turn in named}) > 1
            with suppress(ValueError):  # it writes calls alone
                counts = 1 + self.several_calls
                self.moves_prose = any(moves_prose(self.template, _TWO_CALLS[:n]) for n in range(1, 1 + counts))
            with suppress(ValueError):
                after_turn(self.template, named[0], [result, ASKED])
                self.takes_user_after_results = True

    def _try_reading(self) -> str | None:
        """Why calls are not read, although the template writes them."""
        if self.template.no_calls:
            return None
        end = self.ends.get(Kind.CALLS, self.ends[Kind.ANSWER])
        past = partial(read_past_turn, template=self.template, tool_format=self.tool_format, end=end)
        unread = unread_turn(self, past)
        return unread and (
            f"model {self.model}: its chat template writes calls that are not read as {self.tool_format.name}, such as "
            f"{unread}; set rollout.renderer.tool_format to the format of its calls, or to react"
        )

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Segment]:
        if tools and self.template.no_tools:
            raise ValueError(f"{self.template.no_tools}; add them to chat_template.jinja, or set tool_format to react")
        if tools and self.no_reading:
            raise ValueError(self.no_reading)
        for message in messages:
            self._check_calls(message)
        text = self._render(messages, tools) if messages else self._empty_opening(tools)
        return [Segment(source=Source.PROMPT, token_ids=tuple(self._encode(text)))]

    def bridge(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> list[Segment] | None:
        call_ids = [message.call_id for message in messages if message.call_id is not None]
        if call_ids and (reason := self.no_results or self.no_reading):
            raise ValueError(reason)
        kind = Kind.CALLS if call_ids else Kind.ANSWER
        if self._thinking == "follow" and self._would_rewrite(messages, kind, prompt_ids, sampled_ids, tools):
            return None
        names: list[str] = []
        if self._names_matter and call_ids:
            prefix = call_ids[0].rpartition("_")[0]
            parsed = self.parse(sampled_ids, call_id_prefix=prefix, tools=tools, prompt_ids=prompt_ids)
            call_ids, names = answered_calls(call_ids, parsed.calls)
        if call_ids and not self.several_calls:
            # The template for one call a turn takes several results all the same.
            call_ids, names = call_ids[:1], names[:1]
        tokens = self.bridge_tokens(dummy_turn(() if self.template.no_calls else call_ids, names), messages)
        end = self.ends[kind]
        last = sampled_ids[-1] if sampled_ids else None
        if last == tokens[0].token_id or (last in self.stop_token_ids and not end.opens_next):
            # The closing token was sampled: it is MODEL already.
            tokens = tokens[1:]
        return segments_of(tokens)

    def bridge_tokens(self, turn: Message, following: Sequence[Message]) -> list[GuardedToken]:
        """The template's tokens behind `turn`, from the one that closes it on."""
        kind = Kind.CALLS if any(message.role == "tool" for message in following) else Kind.ANSWER
        text = after_turn(self.template, turn, following)
        closing = self.ends[kind].closing
        place = next((place for place, token in self._guard.controls(text) if token == closing), None)
        if place is None:
            raise ValueError(f"model {self.model}: its chat template does not close this turn with {closing!r}")
        return self._guard.encode(text[place:])

    def turn_ids(self, message: Message) -> tuple[int, ...]:
        self._check_calls(message)
        if message.tool_calls and self.no_reading:
            raise ValueError(self.no_reading)
        if message.tool_calls and message.content.strip() and self.moves_prose:
            raise ValueError(
                f"model {self.model}: its chat template writes what a turn says beside its calls behind their results; "
                "drop it"
            )
        kind = Kind.CALLS if message.tool_calls else Kind.ANSWER
        end = self.ends.get(kind, self.ends[Kind.ANSWER])
        said = sampled_text(self.template, message, self._prompt_text, end)
        ids = self._encode(self._prompt_text + said)
        if ids[: len(self._prompt)] == self._prompt:
            return tuple(ids[len(self._prompt) :])
        # They would grow together; a policy samples after the prompt's own ids.
        return tuple(token.token_id for token in self._guard.encode_after(said))

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        call_id_prefix: str,
        finish_reason: FinishReason = "stop",
        tools: Sequence[ToolSpec] = (),
        prompt_ids: Sequence[int] = (),
    ) -> ParsedTurn:
        body = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_token_ids else token_ids
        # Control tokens are kept: a parser that does not see the call markers finds no call.
        return self.tool_format.parse(
            self.decode(body),
            call_id_prefix=call_id_prefix,
            finish_reason=finish_reason,
            tools=tools,
            in_thinking=self._opened_thinking(prompt_ids),
        )

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        return self.tool_format.structural_tag(tools)

    def encode_text(self, text: str) -> list[int]:
        return self._encode(self._guard.mark(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def count_forged(self, text: str) -> int:
        return self._guard.count_forged(text)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        return self.template.render(messages, tools, writing=self.template.guarded, generation_prompt=True)

    def _encode(self, rendered: str) -> list[int]:
        return [token.token_id for token in self._guard.encode(rendered)]

    def _check_calls(self, message: Message) -> None:
        if message.tool_calls and self.template.no_calls:
            raise ValueError(self.template.no_calls)
        if len(message.tool_calls) > 1 and not self.several_calls:
            raise ValueError(
                f"model {self.model}: its chat template cannot hold the {len(message.tool_calls)} tool calls of one "
                "turn; give each call a turn of its own"
            )

    def _empty_opening(self, tools: Sequence[ToolSpec]) -> str:
        """No library renders an empty conversation; what stands before a first assistant turn is its opening."""
        header = self._prompt_text.removeprefix(
            self.template.render([ASKED], (), writing=self.template.guarded, generation_prompt=False)
        )
        text = self.template.render([dummy_turn(())], tools, writing=self.template.framed, generation_prompt=False)
        before = text[: text.index(START)]
        return before[: before.rindex(header)] + header if header and header in before else before

    def _opened_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside thinking: as the first one does, or (Gemma 4) only behind a result."""
        last = next((i for i in reversed(range(len(prompt_ids))) if prompt_ids[i] in self.control_tokens), None)
        # Its last control token, which no content can hold, is the opener.
        if last is not None and self.decode(prompt_ids[last:]).strip() in THINKING_OPENERS:
            return True
        if self._marks is None or not self._marks.in_prompt:
            return False
        tail = self._prompt[max(i for i, token in enumerate(self._prompt) if token in self.control_tokens) :]
        return not prompt_ids or list(prompt_ids[-len(tail) :]) == tail

    def _would_rewrite(
        self,
        messages: Sequence[Message],
        kind: Kind,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        tools: Sequence[ToolSpec],
    ) -> bool:
        """Whether the template writes what came before otherwise, now that `messages` follow."""
        asked_again = any(message.role == "user" for message in messages)
        kinds = [kind, Kind.ANSWER] if asked_again else [kind]
        thought = Thought.NONE
        if self._marks is not None:
            parsed = self.parse(sampled_ids, call_id_prefix="", tools=tools, prompt_ids=prompt_ids)
            # Turns before this one have been kept so far, but a user message may end that.
            if parsed.thinking.strip() or (asked_again and self._closes_thinking(prompt_ids)):
                thought = Thought.SOME
            elif self._closes_thinking(sampled_ids):
                thought = Thought.EMPTY
        return any(self.rewrites[one, thought] for one in kinds)

    def _closes_thinking(self, token_ids: Sequence[int]) -> bool:
        assert self._marks is not None
        closing_id = self._token_ids.get(self._marks.closing)
        return self._marks.closing in self.decode(token_ids) if closing_id is None else closing_id in token_ids


def segments_of(tokens: Iterable[GuardedToken]) -> list[Segment]:
    """The segments of a bridge: contents are TOOL, what stands around them is TEMPLATE."""
    return [
        Segment(source=Source.TOOL if is_content else Source.TEMPLATE, token_ids=tuple(token.token_id for token in run))
        for is_content, run in groupby(tokens, key=attrgetter("is_content"))
    ]
