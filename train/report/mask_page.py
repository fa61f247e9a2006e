"""The loss masks of a file as one offline page: who wrote each token, whether it is trained, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.types import Source
from train.report.layout import Limits, arrange
from train.report.masks import EXCLUDED_WORDS, KIND_WORDS, SOURCE_WORDS, Kind, MaskTotals, MaskView, totals
from train.report.page import render_page

# A browser draws about this much at once; what lies beyond is counted on the page.
PAGE_LIMITS = Limits(run_tokens=1_500, view_tokens=20_000, tokens=60_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One part of the bar of tokens: places in percent of its width."""

    css: str
    start: float
    width: float
    words: str


def render_mask_page(views: Sequence[MaskView], *, title: str, rows: int, limits: Limits = PAGE_LIMITS) -> str:
    """The page, as HTML.

    Args:
        title: what the page is about (the file).
        rows: how many rows the file has; the views may be fewer.
    """
    return render_page(
        "mask_page.html",
        styles=["page.css", "masks.css"],
        scripts=["masks.js"],
        values={"title": title, "rows": rows, **mask_values(views, limits)},
    )


def mask_values(views: Sequence[MaskView], limits: Limits = PAGE_LIMITS) -> dict[str, Any]:
    """What the mask templates need, also where they are a part of another page."""
    conversations, no_room = arrange(views, limits)
    total = totals(views)
    kinds: list[Kind] = list(dict.fromkeys(view.kind for view in views))
    return {
        "conversations": [(one, totals([one.view])) for one in conversations],
        "no_room": no_room,
        "total": total,
        "shares": token_shares(total),
        "kinds": [KIND_WORDS[kind] for kind in kinds],
        "source_words": SOURCE_WORDS,
        "trained_sources": _trained_sources(total),
        "excluded_words": excluded_words(total),
    }


def _trained_sources(total: MaskTotals) -> list[Source]:
    """What the legend shows as trained: never what is trained by a fault."""
    lawful = [source for source in (Source.MODEL, Source.TARGET) if total.by_source[source]]
    return [source for source in lawful if total.trained_by_source[source]] or lawful[:1]


def excluded_words(total: MaskTotals) -> Mapping[str, int]:
    """Why sampled tokens are left out, in words, with how many."""
    return {EXCLUDED_WORDS[reason]: count for reason, count in total.excluded.most_common()}


def token_shares(total: MaskTotals) -> list[Share]:
    """The bar of tokens: trained ones first, then the others by source."""
    parts = [("on", source, total.trained_by_source[source], "trained") for source in Source]
    masked = total.by_source - total.trained_by_source
    parts += [("off", source, masked[source], "not trained") for source in Source]
    shares: list[Share] = []
    start = 0.0
    for mask, source, count, words in parts:
        if not count:
            continue
        width = 100.0 * count / total.tokens
        shares.append(
            Share(css=f"s-{source.value} {mask}", start=start, width=width, words=f"{count:,} {source.value}, {words}")
        )
        start += width
    return shares
