"""Numbers → pictures for a page: each drawn twice, for light and for dark paper, as SVG inside a data URI.

Shapes and line styles differ as well as colours (Okabe and Ito's, which colour-blind people can tell apart).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

WIDTH, HEIGHT = 5.4, 2.7
_LINE_STYLES = ("-", "--", "-.", ":")
# Straight lines only: a hatch of dots is a thousand shapes.
_HATCHES = ("", "///", "\\\\\\", "---", "xxx", "|||", "++", "//")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one kind of paper."""

    ink: str
    grid: str
    paper: str
    pale: float
    colours: tuple[str, ...]


LIGHT = Theme(
    ink="#4a5462", grid="#e3e0d8", paper="#ffffff", pale=0.35,
    colours=("#0b5cad", "#d55e00", "#008f6b", "#a9568f", "#b58900", "#3f9fd8", "#7a828d", "#6b4d1e"),
)  # fmt: skip
DARK = Theme(
    ink="#b3bcc8", grid="#333a44", paper="#1b1f26", pale=0.55,
    colours=("#6db3f8", "#ff9a52", "#4fd1a5", "#dd9ccb", "#e8c547", "#9bd3f5", "#9aa4b0", "#cfae7a"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure in both themes; `alt` says in words what it shows."""

    light: str
    dark: str
    alt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve: steps and values `[n]`. `name` is shown when there are several."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


def picture(draw: Callable[[Axes, Theme], None], *, alt: str, height: float = HEIGHT, width: float = WIDTH) -> Picture:
    """Let `draw` fill the axes, once for each theme."""
    light, dark = (_svg(draw, theme, width, height) for theme in (LIGHT, DARK))
    return Picture(light=light, dark=dark, alt=alt)


def draw_lines(
    axes: Axes, theme: Theme, lines: Sequence[Line], *, smooth: bool = False, log: bool = False, percent: bool = False
) -> None:
    """Curves by step. `smooth` adds a running mean and pales the single steps; `log` leaves out what is not above 0."""
    for index, line in enumerate(lines):
        colour, style = theme.colours[index % len(theme.colours)], _LINE_STYLES[index % len(_LINE_STYLES)]
        thin = zip(thinned(line.steps), thinned(line.values), strict=True)
        points = [(step, value) for step, value in thin if value > 0 or not log]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        few = "o" if len(points) <= 3 else None
        if smooth and len(points) >= 8:
            axes.plot(steps, values, color=colour, alpha=theme.pale, linewidth=1)
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
        _legend(axes, theme)
    _steps_below(axes)


def draw_stack(
    axes: Axes, theme: Theme, steps: Sequence[int], parts: Mapping[str, Sequence[float]], *, percent: bool = False
) -> None:
    """Parts of a whole by step, one on the other; hatched, so that they can be told apart without colours."""
    centres = thinned(steps)
    half = (centres[1] - centres[0]) / 2 if len(centres) > 1 else 0.5
    edges = [edge for centre in centres for edge in (centre - half, centre + half)]
    bottom = [0.0] * len(edges)
    for index, (name, values) in enumerate(parts.items()):
        # One shape for each part, with steps as flat tops: a bar for each step would make the page ten times as large.
        top = [low + value for low, value in zip(bottom, (v for v in thinned(values) for _ in range(2)), strict=True)]
        axes.fill_between(
            edges,
            bottom,
            top,
            label=name,
            facecolor=theme.colours[index % len(theme.colours)],
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor=theme.paper,
            linewidth=0,
        )
        bottom = top
    if percent:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes, theme)
    _steps_below(axes)


def draw_bars(
    axes: Axes, theme: Theme, groups: Sequence[str], bars: Mapping[str, Sequence[tuple[float | None, float]]]
) -> None:
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
                color=theme.colours[index % len(theme.colours)],
                hatch=_HATCHES[index % len(_HATCHES)],
                edgecolor=theme.paper,
                linewidth=0,
                label=name if place == 0 else None,
            )
            if error:
                axes.errorbar([x], [value], yerr=[error], color=theme.ink, capsize=3, linewidth=1)
            axes.annotate(
                f"{100 * value:.0f}", (x, value + error), (0, 3), textcoords="offset points", ha="center", fontsize=8,
                color=theme.ink,
            )  # fmt: skip
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes, theme)


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


def _svg(draw: Callable[[Axes, Theme], None], theme: Theme, width: float, height: float) -> str:
    style = {
        "svg.hashsalt": "agentgrad",  # the same numbers give the same bytes
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.color": theme.ink,
        "axes.edgecolor": theme.grid,
        "axes.labelcolor": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "grid.color": theme.grid,
        "hatch.color": theme.paper,
        "hatch.linewidth": 0.6,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        draw(axes, theme)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    return "data:image/svg+xml;base64," + base64.b64encode(svg[svg.index("<svg") :].encode()).decode()


def _steps_below(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def _legend(axes: Axes, theme: Theme) -> None:
    # Above the axes: inside them it would hide data.
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, frameon=False, fontsize=8, labelcolor=theme.ink,
        handlelength=1.8, columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip
