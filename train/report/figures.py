"""Which pictures does a report show, and what does a stranger read under them? Metrics → titled, explained figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from train.report.evaluations import EvaluationFile
from train.report.plots import Line, Picture, draw_bars, draw_lines, draw_stack, picture
from train.report.run_data import Row, RunData, keys_under, series

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFigure:
    """A picture with its title, one line of figures, and a sentence that says how to read it."""

    title: str
    numbers: str
    explanation: str
    picture: Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric as curves. Several keys are several curves; with several runs only the first key counts."""

    title: str
    keys: Mapping[str, str]
    explanation: str
    show: Format
    smooth: bool = False
    log: bool = False
    percent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Metrics that add up, as a stack. `keys` (metric → name) come first; the rest of `prefix` follows by size."""

    title: str
    prefix: str
    keys: Mapping[str, str]
    explanation: str
    show: Format
    percent: bool = False


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _nats(value: float) -> str:
    return f"{value:.3g} nats"


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


_SFT_LOSS = Curve(
    title="Loss of the warm start",
    keys={"loss": "loss"},
    explanation="How surprised the model is by the next token of the demonstrations' own turns; lower is better. "
    "Prompts and tool results are read, never learned.",
    show=_nats,
    smooth=True,
)
_SFT_ACCURACY = Curve(
    title="Tokens guessed right",
    keys={"mean_token_accuracy": "accuracy"},
    explanation="Share of the trained tokens that the model thinks likeliest when it has read what stands before them.",
    show=_percent,
    smooth=True,
    percent=True,
)
_REWARD = Curve(
    title="Reward",
    keys={"reward/mean": "mean reward"},
    explanation="Mean over all attempts of a step. Pale: single steps, each with other tasks. Bold: running mean.",
    show=_percent,
    smooth=True,
    percent=True,
)
_LENGTH = Curve(
    title="Length of an attempt",
    keys={"length/mean": "sampled tokens"},
    explanation="Tokens that the policy sampled, per attempt. What tools answer is not counted.",
    show=_count,
    smooth=True,
)
_ENTROPY = Curve(
    title="Entropy",
    keys={"entropy": "entropy"},
    explanation="How undecided the policy is at a trained token. Near zero it has stopped trying other ways.",
    show=_nats,
    smooth=True,
)
_DEAD = Curve(
    title="Groups without a signal",
    keys={"groups/dead": "dead groups"},
    explanation="Share of tasks where all attempts earned the same. They teach nothing and are left out of the update.",
    show=_percent,
    smooth=True,
    percent=True,
)
_GAP = Curve(
    title="Engine against trainer",
    keys={"logprob_gap/mean": "mean", "logprob_gap/max": "largest"},
    explanation="How far the trainer's probability of a sampled token is from the engine's (in logs). It should stay "
    "small: a growing gap means that the model trained is not the model sampled.",
    show=_nats,
    log=True,
)
_GRADIENT = Curve(
    title="Gradient norm",
    keys={"grad_norm": "gradient norm"},
    explanation="Length of the update's gradient before clipping. Sudden peaks mean an unstable step.",
    show=lambda value: f"{value:.3g}",
)
_TOKENS = Stack(
    title="Sampled tokens: trained or left out",
    prefix="tokens/excluded/",
    keys={"tokens/trained": "trained"},
    explanation="Every token that the policy sampled is trained, or left out for a reason that is named.",
    show=_count,
)
_STOPS = Stack(
    title="How attempts ended",
    prefix="stop/",
    keys={"stop/final_answer": "final answer"},
    explanation="Share of attempts by what ended them. Only “final answer” is the policy's own choice.",
    show=_percent,
    percent=True,
)
_TIME = Stack(
    title="Time of a step",
    prefix="time/",
    keys={"time/rollout_s": "sampling", "time/update_s": "update", "time/sync_s": "weight sync"},
    explanation="Where a step's time goes: sampling with tools, the update, and handing the new weights to the engine.",
    show=_seconds,
)


def evaluation_figure(evaluations: Sequence[EvaluationFile]) -> ReportFigure | None:
    """Success and the two pass rates, side by side for each stage."""
    if not evaluations:
        return None
    results = [one.evaluation for one in evaluations]
    most = max((k for result in results for k in result.pass_at_k), default=1)
    bars: dict[str, list[tuple[float | None, float]]] = {
        "success": [(result.success, result.success_stderr) for result in results]
    }
    if most > 1:
        bars[f"pass@{most}"] = [(result.pass_at_k.get(most), 0.0) for result in results]
        bars[f"pass^{most}"] = [(result.pass_hat_k.get(most), 0.0) for result in results]
    names = [one.name for one in evaluations]
    alt = "; ".join(f"{one.name}: success {_percent(one.evaluation.success)}" for one in evaluations)
    explanation = "Percent of attempts that succeed, with one standard error."
    if most > 1:
        explanation = (
            f"In percent. Success: an attempt succeeds (whiskers: one standard error). pass@{most}: at least one of "
            f"{most} attempts does, which is what the model can do at all. pass^{most}: all {most} do, which is what "
            "one can rely on."
        )
    return ReportFigure(
        title="Success by stage",
        numbers="",
        explanation=explanation,
        picture=picture(lambda axes: draw_bars(axes, names, bars), alt=alt, width=8.0, height=3.0),
    )


def sft_figures(runs: Sequence[RunData]) -> list[ReportFigure]:
    return _curves([(run.name, run.sft) for run in runs if run.sft], [_SFT_LOSS, _SFT_ACCURACY])


def grpo_figures(runs: Sequence[RunData]) -> list[ReportFigure]:
    """The curves of all runs, and for each run what adds up."""
    named = [(run.name, run.grpo) for run in runs if run.grpo]
    figures = _curves(named, [_REWARD, _LENGTH, _ENTROPY])
    figures += _stacks(named, [_TOKENS, _STOPS])
    figures += _curves(named, [_DEAD, _GAP])
    return [*figures, *_stacks(named, [_TIME]), *_curves(named, [_GRADIENT])]


def _curves(runs: Sequence[tuple[str, Sequence[Row]]], curves: Sequence[Curve]) -> list[ReportFigure]:
    return [figure for curve in curves if (figure := _curve(runs, curve)) is not None]


def _curve(runs: Sequence[tuple[str, Sequence[Row]]], curve: Curve) -> ReportFigure | None:
    lines: list[Line] = []
    for run_name, rows in runs:
        for key, name in curve.keys.items():
            steps, values = series(rows, key)
            if steps:
                lines.append(Line(name=name if len(runs) == 1 else run_name, steps=steps, values=values))
            if len(runs) > 1:
                break
    if not lines:
        return None
    # A reward may be anything; only a share fits an axis from 0 to 100 %.
    percent = curve.percent and all(0 <= value <= 1 for line in lines for value in line.values)
    show = curve.show if percent or not curve.percent else _plain
    numbers = "; ".join(_from_to(line, show, named=len(lines) > 1) for line in lines)
    return ReportFigure(
        title=curve.title,
        numbers=numbers,
        explanation=curve.explanation,
        picture=picture(
            lambda axes: draw_lines(axes, lines, smooth=curve.smooth, log=curve.log, percent=percent),
            alt=f"{curve.title}: {numbers}",
        ),
    )


def _stacks(runs: Sequence[tuple[str, Sequence[Row]]], stacks: Sequence[Stack]) -> list[ReportFigure]:
    figures: list[ReportFigure] = []
    for stack in stacks:
        for run_name, rows in runs:
            figure = _stack(stack, rows)
            if figure is None:
                continue
            title = figure.title if len(runs) == 1 else f"{figure.title}: {run_name}"
            figures.append(
                ReportFigure(
                    title=title, numbers=figure.numbers, explanation=figure.explanation, picture=figure.picture
                )
            )
    return figures


def _stack(stack: Stack, rows: Sequence[Row]) -> ReportFigure | None:
    keys = [key for key in stack.keys if any(key in row for row in rows)]
    keys += [key for key in keys_under(rows, stack.prefix) if key not in stack.keys]
    if not keys:
        return None
    steps = [row["step"] for row in rows]
    # A reason that did not occur in a step is not in its row.
    parts = {_part_name(stack, key): [_number(row.get(key)) for row in rows] for key in keys}
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    numbers = "mean of all steps: " + ", ".join(f"{name} {stack.show(mean)}" for name, mean in means.items())
    return ReportFigure(
        title=stack.title,
        numbers=numbers,
        explanation=stack.explanation,
        picture=picture(
            lambda axes: draw_stack(axes, steps, parts, percent=stack.percent),
            alt=f"{stack.title}: {numbers}",
        ),
    )


def _part_name(stack: Stack, key: str) -> str:
    name = key.removeprefix(stack.prefix).replace("_", " ")
    return stack.keys.get(key) or (f"left out: {name}" if stack is _TOKENS else name)


def _from_to(line: Line, show: Format, *, named: bool) -> str:
    """First and last values; the mean of five, where there are enough, since single steps jump."""
    few = 5 if len(line.values) >= 10 else 1
    first, last = sum(line.values[:few]) / few, sum(line.values[-few:]) / few
    words = f"{show(first)} → {show(last)}" if len(line.values) > 1 else show(last)
    over = f" (means of the first and last {few} steps)" if few > 1 and not named else ""
    return f"{line.name} {words}" if named else words + over


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _plain(value: float) -> str:
    return f"{value:.3g}"
