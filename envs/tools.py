"""Checking a tool call before it runs: is the tool known, and do the arguments fit its schema?"""

from __future__ import annotations

from collections.abc import Sequence

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from envs.types import ToolCall, ToolSpec


def call_error(call: ToolCall, tools: Sequence[ToolSpec]) -> str | None:
    """One line that tells the model what is wrong with `call` and how to recover, or None when it is right.

    >>> tool = ToolSpec(name="add", description="", parameters={"type": "object", "required": ["x"]})
    >>> call_error(ToolCall(call_id="1", name="sum", arguments={}), [tool])
    "error: unknown tool 'sum'; tools: add"
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return f"error: unknown tool {call.name!r}; tools: {', '.join(t.name for t in tools)}"
    problem = best_match(Draft202012Validator(dict(tool.parameters)).iter_errors(dict(call.arguments)))
    if problem is None:
        return None
    where = "".join(f" in {part!r}" for part in problem.path)
    names = ", ".join(tool.parameters.get("properties", {}))
    return f"error: {call.name}: {problem.message}{where}; arguments: {names}"
