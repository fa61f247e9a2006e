"""The table of a soak test: what became of the trajectories of each kind, and what was left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from scripts.bench_soak_faults import KINDS
from scripts.bench_soak_owners import Record

OUTCOMES = {
    "expected": "as expected",
    "sandbox_error": "SandboxError",
    "lost_with_owner": "lost with owner",
    "wrong": "wrong",
    "hung": "hung",
}


def table(
    records: Mapping[int, Record],
    faults: Mapping[str, int],
    remains: Mapping[str, Sequence[str]],
    peak_bytes: Mapping[str, int],
) -> str:
    """Markdown, for a note."""
    lines = ["", "| kind | trajectories | " + " | ".join(OUTCOMES.values()) + " |", "|---|" + "---:|" * 6]
    kinds = [kind for kind in KINDS if any(record.kind == kind for record in records.values())]
    for kind in (*kinds, "all"):
        found = Counter(record.outcome for record in records.values() if kind in (record.kind, "all"))
        cells = (str(found[outcome]) for outcome in OUTCOMES)
        lines.append(f"| {kind.replace('_', ' ')} | {found.total()} | {' | '.join(cells)} |")
    reasons = Counter(record.why for record in records.values() if record.outcome == "sandbox_error")
    if reasons:
        lines += ["", "| SandboxError | trajectories |", "|---|---:|"]
        lines += [f"| {reason.replace('|', '/')} | {count} |" for reason, count in reasons.most_common()]
    lines += ["", f"Faults from outside: {_listed(faults)}."]
    lines += [f"Left at the end: {_listed({kind: len(names) for kind, names in remains.items()})}."]
    peaks = ", ".join(f"{name} {peak / 2**20:.0f} MiB" for name, peak in peak_bytes.items())
    lines += [f"Most memory of one process: {peaks}.", ""]
    return "\n".join(lines)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()) or "none"
