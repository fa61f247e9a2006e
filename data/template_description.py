"""What a renderer made from a chat template says of itself when a run starts, on one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.chat import Thinking
from data.turn_ends import Kind
from data.turn_history import Thought

if TYPE_CHECKING:
    from data.template_renderer import TemplateRenderer


def describe(renderer: TemplateRenderer, thinking: Thinking) -> str:
    """How calls are read, what ends turns, what becomes of thinking, what it cannot write, which tokens no text
    becomes."""
    ends = ", ".join(renderer.control_tokens[token] for token in renderer.stop_token_ids)
    without = {
        "system message": renderer.template.no_system,
        "tools": renderer.template.no_tools,
        "calls": renderer.template.no_calls,
        "results": renderer.no_results,
    }
    missing = [name for name, reason in without.items() if reason]
    reads = f"calls as {renderer.tool_format.name}"
    if renderer.no_reading:
        reads = f"no tools, since its calls are not read as {renderer.tool_format.name}"
    return "; ".join(
        [
            f"{renderer.model}: its chat template, {reads}, turns end with {ends}",
            _describe_thinking(renderer, thinking),
            *([f"it writes no {', no '.join(missing)}"] if missing else []),
            f"{len(renderer.control_tokens)} control tokens, which no text becomes: "
            + " ".join(renderer.control_tokens.values()),
        ]
    )


def _describe_thinking(renderer: TemplateRenderer, thinking: Thinking) -> str:
    words = {Kind.ANSWER: "a user message", Kind.CALLS: "a tool result"}
    causes = [word for kind, word in words.items() if any(renderer.rewrites.get((kind, one)) for one in Thought)]
    if not causes:
        return "the template never rewrites earlier turns"
    when = " or ".join(causes)
    if thinking == "follow":
        return f"thinking followed: a new stream starts where {when} makes it rewrite earlier turns"
    return f"thinking kept: a stream only grows, although {when} makes the template rewrite earlier turns"
