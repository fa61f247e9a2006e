"""Which tool does an object ask for? Of objects that no format reads as its call: other keys, broken JSON, or data.

{"tool": "lookup", "args": {}}                      lookup
{"parameters": {"key": "a"}, "name": "lookup"       lookup, although a bracket is missing
{"name": "lookup", "version": 3}                    none: it holds a tool's name, and asks for nothing
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.types import ToolSpec

ARGUMENT_KEYS = {"arguments", "parameters", "args", "kwargs", "params", "input", "tool_input", "action_input"}
"""Keys under which models write arguments, whatever their form says."""
NAME_KEYS = ("name", "tool", "tool_name", "function", "function_name", "action", "recipient_name")
"""Keys under which they write the tool's name."""
_BESIDES = {"id", "call_id", "type", *NAME_KEYS}
_QUOTE = r"""[\\"'`]*"""
_KEY = re.compile(rf"([A-Za-z_]\w*){_QUOTE}\s*:")


def asked_for(value: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str | None:
    """The known tool that an object names, beside arguments under any key that is usual or is the tool's own, or beside
    nothing.

    >>> lookup = ToolSpec(name="lookup", description="", parameters={})
    >>> asked_for({"tool": "lookup", "args": {}}, [lookup]), asked_for({"tool": "lookup", "of": 1}, [lookup])
    ('lookup', None)
    """
    for tool in tools:
        if tool.name in [value.get(key) for key in NAME_KEYS] and _fits(value.keys(), tool):
            return tool.name
    return None


def asked_for_in(text: str, tools: Sequence[ToolSpec]) -> str | None:
    """The same of the text of an object that cannot be read, in whatever order its keys stand. A key whose colon is
    missing is none; then an argument key and a text that is the name are enough.

    >>> lookup = ToolSpec(name="lookup", description="", parameters={})
    >>> asked_for_in('{"type": "function", "name": "lookup", "parameters": {', [lookup])
    'lookup'
    """
    known = [tool for tool in tools if tool.name in text]
    if not known:
        return None
    keys = {found[1] for found in _KEY.finditer(text)}
    for tool in known:
        name, names = re.escape(tool.name), "|".join(NAME_KEYS)
        under_key = re.search(rf"\b(?:{names}){_QUOTE}\s*[:=]\s*{_QUOTE}{name}(?![\w.-])", text)
        alone = keys & ARGUMENT_KEYS and re.search(rf"""["']{name}["']\s*[,}}\n]""", text)
        own = _properties(tool)
        is_schema = {"properties", "type"} <= keys and "properties" not in own
        if (under_key or alone) and not is_schema and _fits(keys, tool):
            return tool.name
    return None


def describes_tool(value: Mapping[str, Any]) -> bool:
    """Whether an object says what a tool is, and does not call it: what it takes is missing or a schema.

    >>> describes_tool({"name": "ls", "description": "List files.", "parameters": {"properties": {}}})
    True
    """
    given = [value[key] for key in ARGUMENT_KEYS & value.keys()]
    if any(isinstance(one, dict) and one.get("type") == "object" and "properties" in one for one in given):
        return True
    return "description" in value and all(isinstance(one, dict) and (not one or "properties" in one) for one in given)


def _fits(keys: Any, tool: ToolSpec) -> bool:
    """Whether an object with these keys says what a tool shall do, or nothing but which."""
    others = set(keys) - _BESIDES
    return not others or bool(others & (ARGUMENT_KEYS | _properties(tool)))


def _properties(tool: ToolSpec) -> set[str]:
    properties = tool.parameters.get("properties")
    return set(properties) if isinstance(properties, Mapping) else set()
