"""How does a row of tokens read as a conversation? Tokens → messages → runs, with what is too much cut out.

Shared by the page and the terminal. A message ends where the model's end-of-turn token stands, which is found from the
sampled turns themselves, so no chat template needs to be known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from data.types import Source
from train.report.masks import MaskView, TokenView
from train.report.token_text import Part

_ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "model", "ipython"})
# A token may stand for a long run of blanks, and a character may be followed by any number of combining marks.
_LONGEST_TEXT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is shown. run_tokens: of one run of a kind; view_tokens: of one row; tokens: of everything."""

    run_tokens: int
    view_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is shown as one: the tokens of a character or one token; `text` is never longer than a line or two."""

    tokens: tuple[TokenView, ...]
    text: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring tokens of one source, mask, completion, advantage and version. `cut`: how many tokens and characters
    are left out between `head` and `tail`."""

    first: TokenView
    head: tuple[Piece, ...]
    tail: tuple[Piece, ...]
    cut_tokens: int
    cut_characters: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One message. `folded`: long and without a trained token, so a reader rarely wants it at once."""

    label: str
    runs: tuple[Run, ...]
    tokens: int
    trained: int
    folded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A view, ready to be drawn. `left_out`: tokens of whole messages at the end that were too much."""

    view: MaskView
    blocks: tuple[Block, ...]
    left_out: int


def arrange(views: Sequence[MaskView], limits: Limits) -> tuple[list[Conversation], list[MaskView]]:
    """Conversations within the limits, and the views for which there was no room at all."""
    conversations: list[Conversation] = []
    room = limits.tokens
    for place, view in enumerate(views):
        if room <= 0 and conversations:
            return conversations, list(views[place:])
        conversation, shown = _conversation(view, limits, min(room, limits.view_tokens))
        conversations.append(conversation)
        room -= shown
    return conversations, []


def _conversation(view: MaskView, limits: Limits, room: int) -> tuple[Conversation, int]:
    blocks: list[Block] = []
    shown = left_out = 0
    for tokens in _messages(view.tokens):
        if shown >= room and blocks:
            left_out += len(tokens)
            continue
        runs = tuple(_run(run, limits.run_tokens) for run in _runs(tokens))
        shown += sum(run.tokens - run.cut_tokens for run in runs)
        trained = sum(token.trained for token in tokens)
        blocks.append(
            Block(
                label=_label(tokens),
                runs=runs,
                tokens=len(tokens),
                trained=trained,
                folded=trained == 0 and len(tokens) > limits.run_tokens and not any(t.fault for t in tokens),
            )
        )
    return Conversation(view=view, blocks=tuple(blocks), left_out=left_out), shown


def _messages(tokens: Sequence[TokenView]) -> Iterator[list[TokenView]]:
    ends = _turn_ends(tokens)
    message: list[TokenView] = []
    ended = False
    for token in tokens:
        if ended and not _is_blank(token):
            yield message
            message, ended = [], False
        message.append(token)
        ended = ended or (token.control and token.token_id in ends)
    if message:
        yield message


def _turn_ends(tokens: Sequence[TokenView]) -> frozenset[int]:
    """The control tokens that end assistant turns, whoever placed them."""
    own = (Source.MODEL, Source.TARGET)
    last = [
        token
        for token, following in zip_longest(tokens, tokens[1:])
        if token.source in own and (following is None or following.turn != token.turn or following.source not in own)
    ]
    counts = Counter(token.token_id for token in last if token.control)
    return frozenset(token_id for token_id, _ in counts.most_common(1))


def _is_blank(token: TokenView) -> bool:
    """White space after the end of a turn belongs to that turn."""
    return not token.control and all(part.mark or not part.text.strip() for part in token.text)


def _runs(tokens: Sequence[TokenView]) -> Iterator[list[TokenView]]:
    run: list[TokenView] = []
    for token in tokens:
        if run and _run_key(token) != _run_key(run[-1]):
            yield run
            run = []
        run.append(token)
    if run:
        yield run


def _run_key(token: TokenView) -> tuple[object, ...]:
    return token.source, token.why, token.turn, token.completion_id, token.advantage, token.policy_version


def _run(tokens: Sequence[TokenView], most: int) -> Run:
    pieces = list(_pieces(tokens))
    head, tail = pieces, []
    cut: list[Piece] = []
    if len(pieces) > most:
        kept = most // 5
        head, cut, tail = pieces[: most - kept], pieces[most - kept : len(pieces) - kept], pieces[len(pieces) - kept :]
    return Run(
        first=tokens[0],
        head=tuple(head),
        tail=tuple(tail),
        cut_tokens=sum(len(piece.tokens) for piece in cut),
        cut_characters=sum(len(part.text) for piece in cut for part in piece.tokens[0].text),
        tokens=len(tokens),
    )


def _pieces(tokens: Sequence[TokenView]) -> Iterator[Piece]:
    start = 0
    while start < len(tokens):
        end = start + tokens[start].parts - tokens[start].part
        group = tuple(tokens[start:end])
        yield Piece(tokens=group, text=_shortened(group[0].text))
        start = end


def _shortened(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    length = sum(len(part.text) for part in parts)
    if length <= _LONGEST_TEXT:
        return parts
    kept: list[Part] = []
    room = _LONGEST_TEXT // 2
    for part in parts:
        kept.append(Part(part.text[:room], part.mark))
        room -= len(part.text)
        if room <= 0:
            break
    return (*kept, Part(f"… {length - _LONGEST_TEXT // 2} more characters in this token", mark=True))


def _label(tokens: Sequence[TokenView]) -> str:
    sources = {token.source for token in tokens}
    sampled = next((token for token in tokens if token.source is Source.MODEL), None)
    if sampled is not None:
        return f"assistant, turn {sampled.turn}"
    target = next((token for token in tokens if token.source is Source.TARGET), None)
    if target is not None:
        return f"assistant, turn {target.turn} of the demonstration"
    if Source.TOOL in sources:
        return "tool result"
    # Only text behind a control token is a role: content cannot place one.
    for token, following in pairwise(tokens):
        if token.control and not following.control:
            word = "".join(part.text for part in following.text if not part.mark).strip()
            return word if word in _ROLES else "template"
    return "prompt"
