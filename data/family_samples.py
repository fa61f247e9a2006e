"""Turns as a policy would sample them behind a family's header: a demonstration's, and the example by which is seen how
the family writes its calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from data.family_package import ASKED, FamilyPackage
from data.family_turns import CallForm
from envs.types import Message, ToolCall, ToolSpec

EXAMPLE = ToolCall(call_id="call_0", name="tool_name", arguments={"argument": "value"})


def sampled_turn(package: FamilyPackage, message: Message) -> tuple[int, ...]:
    """A turn behind the header of one that is to be sampled, with its stop token.

    Raises:
        ValueError: the family writes no such turn there.
    """
    ids = _behind_header(package, message)
    if ids is None and not message.thinking:
        # The header opens the thinking, and the family writes no thinking where there is none: as a policy would
        # have to, it is closed at once.
        ids = _behind_header(package, replace(message, thinking="."), left_out=".")
    if ids is None:
        raise ValueError(
            f"family {package.name} writes no turn {'with' if message.thinking else 'without'} thinking behind the "
            "header that it gives a turn to be sampled; see enable_thinking"
        )
    if message.thinking and package.ends_thinking(ids[0]):
        # Dropped from what counts as history, and yet the header opened it.
        ids = (*package.encode_text(message.thinking), *ids)
    return ids if ids[-1] in package.stop_token_ids else (*ids, package.stop_token_ids[0])


def _behind_header(package: FamilyPackage, message: Message, left_out: str = "") -> tuple[int, ...] | None:
    """A turn as the family writes it, without what its header holds already and without `left_out` behind that;
    None where the turn does not begin so. The header's last token may have grown together with the turn's first
    (`\n` + `\n`): what is left of it is encoded anew, as a policy would have to sample it."""
    answers = [Message(role="tool", content=".", call_id=call.call_id) for call in message.tool_calls]
    rendered = package.render([ASKED, message, *answers], (), header=False)
    written = enumerate(zip(rendered.message_indices, rendered.sampled_mask, strict=True))
    end = max(place for place, (index, by_model) in written if index == 1 and by_model) + 1
    if max(rendered.message_indices[:end]) > 1:
        raise ValueError(f"family {package.name} writes the prose of a turn behind the results of its calls; drop it")
    ids, header = rendered.token_ids[:end], package.render([ASKED], (), header=True).token_ids
    same = next((i for i, (a, b) in enumerate(zip(header, ids, strict=False)) if a != b), min(len(header), end))
    missing = package.tokenizer.decode(header[same:]) + left_out
    for middle in range(same, end + 1):
        text = package.tokenizer.decode(ids[same:middle])
        # As texts they may look the same and be others: what a message says looks like a token of the header.
        if not missing.startswith(text[: len(missing)]) or any(
            token in package.control_tokens for token in [*header[same:], *ids[same:middle]]
        ):
            return None
        if text.startswith(missing):
            return (*package.encode_text(text[len(missing) :]), *ids[middle:])
    return None


def empty_opening(package: FamilyPackage, tools: Sequence[ToolSpec]) -> list[int]:
    """No family renders an empty conversation; what stands before a first assistant turn is its opening."""
    header = _header(package)
    written = package.render([Message(role="assistant", content=".")], tools, header=False)
    places = zip(written.message_indices, written.sampled_mask, strict=True)
    said = next((place for place, (index, by_model) in enumerate(places) if index == 0 and by_model), 0)
    before = written.token_ids[:said]
    if not header or header[0] not in before or header[0] not in package.control_tokens:
        raise ValueError(f"family {package.name} cannot write a conversation that begins with an assistant turn")
    return [*before[: len(before) - 1 - before[::-1].index(header[0])], *header]


def _header(package: FamilyPackage) -> list[int]:
    """What the family writes before a turn that is to be sampled."""
    opened, asked = (package.render([ASKED], (), header=header).token_ids for header in (True, False))
    return opened[len(asked) :] if opened[: len(asked)] == asked else []


def call_form(package: FamilyPackage) -> CallForm:
    """How the family writes a call: for a model that wrote one in another way, and to see which are read."""
    form = CallForm(
        writing=package.traits.writing,
        example=f"{EXAMPLE.name} with the arguments {dict(EXAMPLE.arguments)}",
        ends_thinking=frozenset(filter(package.ends_thinking, package.control_tokens)),
        opens_thinking=frozenset(filter(package.opens_thinking, package.control_tokens)),
    )
    try:
        turn = sampled_turn(package, Message(role="assistant", tool_calls=(EXAMPLE,)))
    except ValueError:
        return form
    begin = max(place for place, token in enumerate((0, *turn)) if place == 0 or package.ends_thinking(token))
    form = replace(form, example=package.tokenizer.decode(turn[begin:-1]).strip())
    header = package.render([ASKED], (), header=True).token_ids
    spans = [call.token_span for call in package.read(turn[:-1], header, ()).tool_calls]
    if not spans or spans[0] is None:
        return form
    start, end = spans[0]
    around = package.control_tokens.keys() & {*turn[:start], *turn[end:-1]}
    plain: set[int] = set()
    for thinking in (".", ""):
        with suppress(ValueError):
            plain.update(sampled_turn(package, Message(role="assistant", content=".", thinking=thinking)))
    own = package.control_tokens.keys() - plain - around
    return replace(
        form,
        opener=next((token for token in turn[start:end] if token in own), None),
        inner=frozenset(own.intersection(turn[start:end])),
        around=frozenset(around - plain - form.ends_thinking - form.opens_thinking),
    )
