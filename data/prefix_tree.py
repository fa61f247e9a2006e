"""Which beginnings do samples have in common, and how do they lie in one row when each is there only once?

Siblings of a group start with the same prompt, streams of a trajectory and tasks of an environment with the same system
text and tools. A row is made of pieces; a sample is a path of pieces from a root on. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from data.types import Source, TrainingSample

MIN_SAVED_TOKENS = 16
MAX_PATH_PER_SAVED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Columns `start` to `stop - 1` of a row. Its tokens continue those of `parent`, an earlier piece of the row, or
    start a sample where that is None; they see their ancestors and what is before them in the piece."""

    start: int
    stop: int
    parent: int | None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class PrefixTree:
    """The row: its tokens, its pieces in order, and for each sample its last piece."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], parent: int | None) -> int:
        """Append a piece; returns its number."""
        start = len(self.token_ids)
        self.token_ids += token_ids
        self.pieces.append(Piece(start=start, stop=len(self.token_ids), parent=parent))
        return len(self.pieces) - 1


def piece_path(pieces: Sequence[Piece], last: int) -> tuple[int, ...]:
    """The pieces of a sample that ends with `last`, its beginning first.

    >>> pieces = [Piece(start=0, stop=4, parent=None), Piece(start=4, stop=6, parent=0)]
    >>> piece_path(pieces, 1), piece_path(pieces, 0)
    ((0, 1), (0,))
    """
    path = [last]
    while (parent := pieces[path[-1]].parent) is not None:
        path.append(parent)
    return tuple(reversed(path))


def sharable_tokens(sample: TrainingSample) -> int:
    """How many tokens at a sample's beginning may be shared: those before the first that was sampled or is trained, and
    not the whole sample, so that it has a piece of its own. The last of them may predict a trained token: one hidden
    state serves several targets."""
    own = (
        i for i, source in enumerate(sample.source) if source in (Source.MODEL, Source.TARGET) or sample.loss_mask[i]
    )
    return min(next(own, len(sample)), len(sample) - 1)


def common_tokens(first: TrainingSample, second: TrainingSample) -> int:
    """How many tokens two samples could share.

    With prompts `[7, 8, 4]` and `[7, 8, 5]`, two.
    """
    limit = min(sharable_tokens(first), sharable_tokens(second))
    return _common(first.token_ids, second.token_ids, 0, limit)


def sharing_pays(samples: int, start: int, stop: int) -> bool:
    """Whether `samples` samples should share their tokens `start` to `stop - 1`, whose ancestors end at `start`.

    It saves the linear layers all but one of the copies. It costs each sample a copy of its path in every attention
    layer, and the shared piece an attention over its own path, so it must save a share of the path's length.

    >>> sharing_pays(8, 0, 300), sharing_pays(2, 0, 3), sharing_pays(2, 3000, 3002)
    (True, False, False)
    """
    saved = (samples - 1) * (stop - start)
    return saved >= MIN_SAVED_TOKENS and saved * MAX_PATH_PER_SAVED >= stop


def grow_tree(samples: Sequence[TrainingSample]) -> PrefixTree:
    """The row of samples that share what pays (`sharing_pays`); the same for the same samples in the same order."""
    tree = PrefixTree(leaves=[-1] * len(samples))
    limits = [sharable_tokens(sample) for sample in samples]
    _branch(tree, samples, limits, list(range(len(samples))), start=0, known=0, parent=None)
    return tree


def _branch(
    tree: PrefixTree,
    samples: Sequence[TrainingSample],
    limits: Sequence[int],
    members: Sequence[int],
    *,
    start: int,
    known: int,
    parent: int | None,
) -> None:
    """Add what members have after token `start`, where `parent` ends; they are the same up to token `known`."""
    by_next: dict[tuple[int, int], list[int]] = {}
    for index in members:
        # Whoever may share no more goes on alone.
        key = (samples[index].token_ids[known], -1) if limits[index] > known else (0, index)
        by_next.setdefault(key, []).append(index)
    for same in by_next.values():
        ids = samples[same[0]].token_ids
        if len(same) == 1:
            tree.leaves[same[0]] = tree.add(ids[start:], parent)
            continue
        stop = min(limits[index] for index in same)
        for index in same[1:]:
            stop = _common(ids, samples[index].token_ids, known, stop)
        if sharing_pays(len(same), start, stop):
            piece = tree.add(ids[start:stop], parent)
            _branch(tree, samples, limits, same, start=stop, known=stop, parent=piece)
        else:
            _branch(tree, samples, limits, same, start=start, known=stop, parent=parent)


def _common(first: Sequence[int], second: Sequence[int], known: int, limit: int) -> int:
    """The length of the common beginning, at most `limit`; the first `known` tokens are the same.

    >>> _common((7, 8, 4, 1), (7, 8, 5, 1), 0, 4)
    2
    """
    low, high = known, limit
    while low < high:  # slices are compared faster than tokens one by one
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
