"""Numbers → pictures for a page: each for light and for dark paper, as SVG inside a data URI.

Shapes and line styles differ as well as colours (Okabe and Ito's, which colour-blind people can tell apart).
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

WIDTH, HEIGHT = 5.4, 2.7
_MARGINS = (0.5, 0.1, 0.42, 0.12)
_LEGEND_ROW = 0.19
# More flat tops than this are thinner than their hatching.
_MOST_TOPS = 120
_LINE_STYLES = ("-", "--", "-.", ":")
# Straight lines only: a hatch of dots is a thousand shapes.
_HATCHES = ("", "///", "\\\\\\", "---", "xxx", "|||", "++", "//")


INK, GRID, PAPER = "#4a5462", "#e3e0d8", "#ffffff"
COLOURS = ("#0b5cad", "#d55e00", "#008f6b", "#a9568f", "#b58900", "#3f9fd8", "#7a828d", "#6b4d1e")
# The same picture on dark paper: every colour has its counterpart, so it is drawn once and recoloured.
_ON_DARK = {
    INK: "#b3bcc8", GRID: "#333a44", PAPER: "#1b1f26",
    **dict(
        zip(
            COLOURS,
            ("#6db3f8", "#ff9a52", "#4fd1a5", "#dd9ccb", "#e8c547", "#9bd3f5", "#9aa4b0", "#cfae7a"),
            strict=True,
        )
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure for light and for dark paper; `alt` says in words what it shows."""

    light: str
    dark: str
    alt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: steps and values `[n]`. `name` is shown when there are several."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


def picture(draw: Callable[[Axes], None], *, alt: str, height: float = HEIGHT, width: float = WIDTH) -> Picture:
    """Let `draw` fill the axes; sizes in inches."""
    svg = _svg(draw, width, height)
    dark = re.sub("|".join(_ON_DARK), lambda colour: _ON_DARK[colour[0]], svg)
    return Picture(light=_data_uri(svg), dark=_data_uri(dark), alt=alt)


def draw_lines(
    axes: Axes, lines: Sequence[Line], *, smooth: bool = False, log: bool = False, percent: bool = False
) -> None:
    """Curves by step. `smooth` adds a running mean and pales the single steps; `log` leaves out what is not above 0."""
    for index, line in enumerate(lines):
        colour, style = COLOURS[index % len(COLOURS)], _LINE_STYLES[index % len(_LINE_STYLES)]
        thin = zip(thinned(line.steps), thinned(line.values), strict=True)
        points = [(step, value) for step, value in thin if value > 0 or not log]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        few = "o" if len(points) <= 3 else None
        if smooth and len(points) >= 8:
            axes.plot(steps, values, color=colour, alpha=0.4, linewidth=1)
            axes.plot(steps, running_mean(values), color=colour, linestyle=style, linewidth=2.2, label=line.name)
        else:
            axes.plot(steps, values, color=colour, linestyle=style, linewidth=1.8, label=line.name, marker=few)
    if log:
        axes.set_yscale("log")
        axes.minorticks_off()
    elif percent:
        axes.set_ylim(-0.02, 1.02)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if len(lines) > 1:
        _legend(axes)
    _steps_below(axes)


def draw_stack(
    axes: Axes, steps: Sequence[int], parts: Mapping[str, Sequence[float]], *, percent: bool = False
) -> None:
    """Parts of a whole by step, one on the other; hatched, so that they can be told apart without colours."""
    centres = thinned(steps, _MOST_TOPS)
    half = (centres[1] - centres[0]) / 2 if len(centres) > 1 else 0.5
    edges = [edge for centre in centres for edge in (centre - half, centre + half)]
    bottom = [0.0] * len(edges)
    for index, (name, values) in enumerate(parts.items()):
        # One shape for each part, with steps as flat tops: a bar for each step would make the page ten times as large.
        top = [
            low + value
            for low, value in zip(bottom, (v for v in thinned(values, _MOST_TOPS) for _ in range(2)), strict=True)
        ]
        axes.fill_between(
            edges,
            bottom,
            top,
            label=name,
            facecolor=COLOURS[index % len(COLOURS)],
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor=PAPER,
            linewidth=0,
        )
        bottom = top
    if percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes)
    _steps_below(axes)


def draw_bars(axes: Axes, groups: Sequence[str], bars: Mapping[str, Sequence[tuple[float | None, float]]]) -> None:
    """Bars side by side: for each name, a share and its standard error (0: none) for each group."""
    width = 0.8 / max(1, len(bars))
    for index, (name, values) in enumerate(bars.items()):
        for place, (value, error) in enumerate(values):
            if value is None:
                continue
            x = place - 0.4 + width * (index + 0.5)
            axes.bar(
                [x],
                [value],
                width=0.9 * width,
                color=COLOURS[index % len(COLOURS)],
                hatch=_HATCHES[index % len(_HATCHES)],
                edgecolor=PAPER,
                linewidth=0,
                label=name if place == 0 else None,
            )
            if error:
                axes.errorbar([x], [value], yerr=[error], color=INK, capsize=3, linewidth=1)
            axes.annotate(
                f"{100 * value:.0f}", (x, value + error), (0, 3), textcoords="offset points", ha="center", fontsize=8,
                color=INK,
            )  # fmt: skip
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes)


def running_mean(values: Sequence[float], window: int = 7) -> list[float]:
    """Mean over the `window` values around each one (fewer at the ends).

    >>> running_mean([0.0, 3.0, 6.0], window=3)
    [1.5, 3.0, 4.5]
    """
    half = window // 2
    spans = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def thinned(values: Sequence[float], most: int = 400) -> list[float]:
    """At most `most` values, each the mean of its neighbours: more points than a picture is wide show nothing more.

    >>> thinned([1.0, 3.0, 5.0, 7.0], most=2)
    [2.0, 6.0]
    """
    size = -(-len(values) // most) if values else 1
    spans = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(span) / len(span) for span in spans]


def _svg(draw: Callable[[Axes], None], width: float, height: float) -> str:
    style: dict[Any, Any] = {
        "svg.hashsalt": "agentgrad",  # the same numbers give the same bytes
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": GRID,
        "hatch.color": PAPER,
        "hatch.linewidth": 0.6,
    }
    with mpl.rc_context(style):
        figure = Figure()
        axes = figure.add_axes((0, 0, 1, 1))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        draw(axes)
        _place(figure, axes, width, height)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def _legend(axes: Axes) -> None:
    # Above the axes: inside them it would hide data.
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=_legend_columns(axes), frameon=False, fontsize=8,
        labelcolor=INK, handlelength=1.8, columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip


def _legend_columns(axes: Axes) -> int:
    names = axes.get_legend_handles_labels()[1]
    return 3 if max(map(len, names), default=0) <= 20 else 2


def _place(figure: Figure, axes: Axes, width: float, height: float) -> None:
    """Fixed margins, in inches: the axes of all figures line up, and nothing has to be measured. A legend adds its rows
    to the height."""
    left, right, bottom, top = _MARGINS
    if axes.get_legend() is not None:
        rows = -(-len(axes.get_legend_handles_labels()[1]) // _legend_columns(axes))
        top += rows * _LEGEND_ROW
        height += (rows - 1) * _LEGEND_ROW
    figure.set_size_inches(width, height)
    axes.set_position((left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height))
