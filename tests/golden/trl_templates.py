"""What becomes of every chat template that TRL ships, as a table.

    python -m tests.golden.trl_templates        writes it again

Each template gets a small tokenizer with the control tokens that it writes.
"""

from __future__ import annotations

from data.template_renderer import TemplateRenderer
from data.turn_ends import Kind
from data.turn_history import Thought
from tests.data.chat_tokenizers import peer_templates, tokenizer_for
from tests.golden.tables import FOLDER

PATH = FOLDER / "trl_templates.tsv"
_COLUMNS = ("template", "a user message comes", "tool results come", "turns end with", "calls read as", "cannot write")


def row(name: str, template: str) -> str:
    """One template: what its renderer does when the conversation goes on, and what it refuses."""
    try:
        renderer = TemplateRenderer(tokenizer_for(template), name=name)
    except ValueError as error:
        return "\t".join([name, f"refused: {error}", "", "", "", ""])
    ends = ", ".join(renderer.control_tokens[token] for token in renderer.stop_token_ids)
    outcomes = (outcome(renderer, kind) for kind in Kind)
    return "\t".join([name, *outcomes, ends, read_as(renderer), "; ".join(missing(renderer)) or "-"])


def outcome(renderer: TemplateRenderer, kind: Kind) -> str:
    """`exact`: the stream and the native rendering are the same ids. `new stream`: the template rewrites what came
    before (after turns with, without, or with empty thinking)."""
    if kind not in renderer.ends or (kind is Kind.CALLS and renderer.no_reading):
        return "refused"
    rewritten = [thought.value for thought in Thought if renderer.rewrites[kind, thought]]
    if not rewritten:
        return "exact"
    always = len(rewritten) == len(Thought)
    return "new stream" if always else f"exact; new stream where thinking is {' or '.join(rewritten)}"


def read_as(renderer: TemplateRenderer) -> str:
    """The format that reads the template's own calls."""
    if renderer.template.no_calls:
        return "-"
    return "none: tools are refused" if renderer.no_reading else renderer.tool_format.name


def missing(renderer: TemplateRenderer) -> list[str]:
    """What the template cannot write, with the reason."""
    template = renderer.template
    reasons = {
        "system message": template.no_system,
        "tools": template.no_tools,
        "calls": template.no_calls,
        "tool results": renderer.no_results,
    }
    found = [f"{what} ({_short(reason, renderer.model)})" for what, reason in reasons.items() if reason]
    found += ["prose beside calls (comes behind their results)"] if renderer.moves_prose else []
    return found if renderer.several_calls or template.no_calls else [*found, "two calls in a turn"]


def _short(reason: str, model: str) -> str:
    return reason.removeprefix(f"model {model}: its chat template ").split("; mend")[0]


def table() -> str:
    rows = [row(name, template) for name, template in peer_templates().items()]
    return "\n".join(["\t".join(_COLUMNS), *rows]) + "\n"


if __name__ == "__main__":
    PATH.write_text(table(), encoding="utf-8")
