"""Values that are written as plain text, typed by the tool's schema: the text between two XML tags, a word in brackets.

Text stays text unless the schema wants something else and the text is exactly that. What is not stays text too, so that
the schema check tells the model what was wanted (a date where an integer belongs).

    schema              text                 value
    string              02134 / true / ""    "02134" / "true" / ""
    integer             5.0 / 2026-01-15     5 / "2026-01-15"
    integer or string   5 / 02134            5 / "02134"
    string or null      None / null          None
    boolean             True / yes           True / "yes"
    array, object       [1, 2]               [1, 2]
    no string           "" / None            not given
    nothing said        5                    "5"
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from data.tool_formats.json_calls import read_json
from data.tool_formats.parts import Malformed
from envs.types import ToolSpec

_NOTHING = {"", "null", "none"}
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MAX_REFERENCES = 16


class NotGiven:
    """An argument that was written as nothing, where the schema takes no nothing: it is left out."""


def typed(text: str, tool: ToolSpec | None, parameter: str) -> Any:
    """The value that `text` stands for in that parameter of the tool; `NotGiven` where it stands for none.

    >>> tool = ToolSpec(name="f", description="", parameters={"properties": {"n": {"type": "integer"}}})
    >>> typed("5.0", tool, "n"), typed("five", tool, "n"), typed("5", tool, "m")
    (5, 'five', '5')
    """
    types = types_of(tool, parameter)
    if not types or types == {"string"}:
        return text
    bare = text.strip()
    if bare.lower() in _NOTHING:
        if "null" in types and bare:
            return None
        return text if "string" in types else NotGiven
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    value = _as_json(bare)
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        # Not int(value): a float of more than 15 digits is another number.
        value = int(Decimal(bare))
    kind = _JSON_TYPES.get(type(value), "")
    fits = kind in types or (kind == "integer" and "number" in types)
    return value if fits and kind != "string" else text


def types_of(tool: ToolSpec | None, parameter: str) -> set[str]:
    """The JSON types that the schema of a parameter takes; empty where it does not say."""
    root = tool.parameters if tool else {}
    properties = root.get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    return _types(schema, root, _MAX_REFERENCES)


def _as_json(text: str) -> Any:
    try:
        value, end = read_json(text, 0)
    except Malformed:
        return None
    return value if end == len(text) else None


def _types(schema: Any, root: Mapping[str, Any], references: int) -> set[str]:
    """All JSON types that a schema may take; empty where it does not say."""
    if not isinstance(schema, Mapping) or references == 0:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(root, reference), root, references - 1)
    declared = schema.get("type")
    if declared is not None:
        return {declared} if isinstance(declared, str) else {str(one) for one in declared}
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    types = {"null" if value is None else _JSON_TYPES.get(type(value), "") for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(key, ()):
            types |= _types(one, root, references - 1)
    return types


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference inside the schema (`#/$defs/Place`) points at; None where that is nothing."""
    place: Any = root
    for part in reference.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place
