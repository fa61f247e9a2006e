"""Our messages as a family's hand-written renderer takes them: every text protected, calls and results numbered and
headed as the family's models read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from data.families import Family
from data.family_tokenizer import FamilyTokenizer
from envs.types import Message


class Answered(NamedTuple):
    """A call of a sampled turn, as far as its result is headed by it: its tool, and the id that the model wrote."""

    name: str = ""
    written_id: str = ""


class FamilyMessages:
    """Messages → rows of the package `renderers`.

    Args:
        tokenizer: protects the texts.
        traits: what is known about the family.
    """

    def __init__(self, tokenizer: FamilyTokenizer, traits: Family) -> None:
        self._tokenizer = tokenizer
        self._traits = traits

    def rows(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """A conversation from its beginning; where the family's models number calls, they are numbered so."""
        rows: list[dict[str, Any]] = []
        ids: dict[str | None, str] = {}
        number = 0
        for message in messages:
            for call in message.tool_calls:
                numbered = self._traits.call_ids
                ids[call.call_id] = numbered.format(name=call.name, number=number) if numbered else call.call_id
                number += 1
            rows.append(self._row(message, ids))
        return rows

    def answers_need_calls(self, messages: Sequence[Message]) -> bool:
        """Whether these results are headed by what they answer, which stands in the sampled turn."""
        headed = self._traits.named_results or self._traits.call_ids is not None
        return headed and any(message.role == "tool" for message in messages)

    def answers(self, messages: Sequence[Message], calls: Sequence[Answered]) -> list[dict[str, Any]]:
        """What comes behind a sampled turn with these calls."""
        rows = [self._row(message, {}) for message in messages]
        results = [row for row in rows if row["role"] == "tool"]
        places = places_of([message.call_id or "" for message in messages if message.role == "tool"], len(calls))
        for place, row in zip(places, results, strict=True):
            call = calls[place] if place < len(calls) else Answered()
            if self._traits.named_results:
                row["name"] = self._tokenizer.protect(call.name or "unknown")
            elif self._traits.call_ids is not None and call.written_id:
                row["tool_call_id"] = self._tokenizer.protect(call.written_id)
        if self._traits.between_results is not None and len(results) > 1:
            joined = self._traits.between_results.join(row["content"] for row in results)
            return [results[0] | {"content": joined}, *(row for row in rows if row["role"] != "tool")]
        return rows

    def _row(self, message: Message, ids: dict[str | None, str]) -> dict[str, Any]:
        protect = self._tokenizer.protect
        row: dict[str, Any] = {"role": message.role, "content": protect(message.content)}
        if message.thinking:
            row["reasoning_content"] = protect(message.thinking)
        if message.tool_calls:
            row["tool_calls"] = [
                {
                    "type": "function",
                    "id": protect(ids[call.call_id]),
                    "function": {
                        "name": protect(call.name),
                        "arguments": self._tokenizer.protect_all(dict(call.arguments)),
                    },
                }
                for call in message.tool_calls
            ]
        if message.call_id is not None:
            row["tool_call_id"] = protect(ids.get(message.call_id, message.call_id))
        return row


def places_of(call_ids: Sequence[str], num_calls: int) -> list[int]:
    """Which call of a turn each result answers, by the ids that the host gives to calls (`call_3_0`, `call_3_1`); where
    these are others, the results stand in the order of their calls.

    >>> places_of(["call_3_1", "call_3_0"], 2), places_of(["b", "a"], 2)
    ([1, 0], [0, 1])
    """
    prefix = call_ids[0].rpartition("_")[0] if call_ids else ""
    hosts = [f"{prefix}_{number}" for number in range(num_calls)]
    if len({*call_ids}) == len(call_ids) and {*call_ids} <= {*hosts}:
        return [hosts.index(call_id) for call_id in call_ids]
    return list(range(len(call_ids)))
