"""The loss masks in a terminal: the same conversations as on the page, for a remote shell.

Trained tokens are underlined and bold on a tint, so that they stand out without colours too; where there are no styles
at all (a pipe, a log), they stand in `«…»`. A control token stands in `⟦…⟧`, and those four characters are shown by
number in other text, so nothing can be mistaken for a mark. No escape sequence of a run reaches the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from data.types import Source
from train.report.layout import Block, Limits, Piece, Run, arrange
from train.report.mask_page import excluded_words
from train.report.masks import KIND_WORDS, SOURCE_WORDS, Kind, MaskTotals, MaskView, totals
from train.report.token_text import safe

TERMINAL_LIMITS = Limits(run_tokens=400, view_tokens=4_000, tokens=20_000)

_STYLES: Mapping[Source, str] = {
    Source.PROMPT: "bright_black",
    Source.MODEL: "blue",
    Source.TOOL: "yellow",
    Source.TEMPLATE: "magenta",
    Source.TARGET: "green",
}
_TINTS: Mapping[Source, str] = {Source.TARGET: "on dark_green"}
_BRACKETS = str.maketrans({bracket: f"U+{ord(bracket):04X}" for bracket in "«»⟦⟧"})


def print_masks(
    console: Console, views: Sequence[MaskView], *, title: str, rows: int, limits: Limits = TERMINAL_LIMITS
) -> None:
    """Print the views, with a legend before and the totals after them."""
    conversations, no_room = arrange(views, limits)
    total = totals(views)
    plain = not console.is_terminal or console.no_color
    console.print(Text(safe(title), style="bold"))
    kinds: list[Kind] = list(dict.fromkeys(view.kind for view in views))
    for kind in kinds:
        console.print(Text(KIND_WORDS[kind]))
    console.print(_legend(total, plain))
    for conversation in conversations:
        its_total = totals([conversation.view])
        console.print()
        console.print(Text.assemble((safe(conversation.view.title), "bold"), f"  {_share(its_total)}"))
        if conversation.view.facts:
            facts = (f"{name} {safe(value)}" for name, value in conversation.view.facts.items())
            console.print(Text("; ".join(facts), style="dim"))
        for block in conversation.blocks:
            console.print(_block(block, plain), soft_wrap=True)
        if conversation.left_out:
            console.print(Text(f"… the last {conversation.left_out:,} tokens of this row are not shown …", style="dim"))
    console.print()
    if no_room or rows > len(views):
        console.print(Text(f"{len(conversations)} of {rows:,} rows are shown; --limit chooses how many", style="dim"))
    for words, count in excluded_words(total).items():
        console.print(Text(f"{count:,} sampled tokens are left out: {words}"))
    if total.faults:
        console.print(Text(f"⚠ {total.faults:,} tokens break the law of the mask", style="bold red"))
    console.print(Text(f"total: {_share(total)}", style="bold"))


def _share(total: MaskTotals) -> str:
    return f"{total.trained:,} of {total.tokens:,} tokens trained ({100 * total.share:.1f} %)"


def _legend(total: MaskTotals, plain: bool) -> Text:
    legend = Text()
    for source in Source:
        trained = total.trained_by_source[source]
        if trained:
            legend.append_text(_wrapped(Text(f"{source.value}, trained"), source, trained=True, plain=plain))
            legend.append(f"  {trained:,} tokens\n")
        if total.by_source[source] > trained:
            legend.append(source.value, style=_STYLES[source])
            legend.append(f"  {total.by_source[source] - trained:,} tokens, not trained: {SOURCE_WORDS[source]}\n")
    legend.append("⟦control token⟧, placed by id", style="dim")
    return legend


def _block(block: Block, plain: bool) -> Text:
    trained = f"{block.trained} of {block.tokens} trained" if block.trained else f"{block.tokens} tokens, none trained"
    text = Text.assemble("\n── ", (safe(block.label), "bold"), (f"  {trained}", "dim"))
    for run in block.runs:
        if run.first.fault or run.first.excluded is not None:
            text.append(f"  {safe(run.first.why)}", style="bold red" if run.first.fault else "dim")
    text.append("\n")
    for run in block.runs:
        text.append_text(_run(run, plain))
    text.rstrip()
    return text


def _run(run: Run, plain: bool) -> Text:
    text = Text()
    for piece in run.head:
        text.append_text(_piece(piece))
    if run.cut_tokens:
        words = f" … {run.cut_tokens:,} more {run.first.source.value} tokens ({run.cut_characters:,} characters) … "
        text.append(words, style="reverse")
    for piece in run.tail:
        text.append_text(_piece(piece))
    if run.first.fault:
        text.stylize("bold white on red")
        return Text.assemble("⚠ ", text)
    return _wrapped(text, run.first.source, trained=run.first.trained, plain=plain)


def _wrapped(text: Text, source: Source, *, trained: bool, plain: bool) -> Text:
    style = f"bold underline {_TINTS.get(source, 'on dark_blue')} white" if trained else _STYLES[source]
    styled = Text(style=style)
    styled.append_text(text)
    return Text.assemble("«", styled, "»") if trained and plain else styled


def _piece(piece: Piece) -> Text:
    text = Text()
    for part in piece.text:
        text.append(part.text.translate(_BRACKETS), style="dim" if part.mark else "")
    return Text.assemble("⟦", text, "⟧") if piece.tokens[0].control else text
