"""Values typed by the tool's schema: what is written as plain text (between two XML tags, a word in brackets), and
numbers of any form.

Text stays text unless the schema wants something else and the text is exactly that. What is not stays text too, so that
the schema check tells the model what was wanted (a date where an integer belongs).

    schema              text                 value
    string              02134 / true / ""    "02134" / "true" / ""
    integer             5.0 / 2026-01-15     5 / "2026-01-15"
    integer or string   5 / 02134            5 / "02134"
    string or null      None / null / ""     None / None / ""
    integer or null     None / ""            None / not given (None, where it is required)
    boolean             True / yes           True / "yes"
    array, object       [1, 2]               [1, 2]
    no string           "" / None            not given
    nothing said        5                    "5"

`nullable`, a list of types and `anyOf` say alike that null is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from data.tool_formats.json_calls import read_json
from data.tool_formats.parts import Malformed
from envs.types import ToolSpec

_NOTHING = {"", "null", "none"}
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_MAX_SCHEMAS = 256
"""That one value may be read by: a schema may refer to others without end."""
_LAST_EXACT = 2**53
"""Up to here a float is the whole number that was written."""


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
        if "null" in types and (bare or ("string" not in types and _is_required(tool, parameter))):
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
    return _types(_alternatives([schema], root))


def whole_numbers(arguments: Mapping[str, Any], tool: ToolSpec | None) -> Mapping[str, Any]:
    """The arguments, with an integer wherever the schema wants one and the model wrote it as `5.0`.

    A float of more than 15 digits may be another number than the one that was written: it stays.

    >>> tool = ToolSpec(name="f", description="", parameters={"properties": {"n": {"type": "integer"}}})
    >>> whole_numbers({"n": 5.0, "m": 5.0}, tool)
    {'n': 5, 'm': 5.0}
    """
    return _whole(arguments, [tool.parameters], tool.parameters) if tool else arguments


def _whole(value: Any, schemas: Iterable[Any], root: Mapping[str, Any]) -> Any:
    if not isinstance(value, float | list | Mapping):
        return value
    found = _alternatives(schemas, root)
    if isinstance(value, float):
        types = _types(found)
        is_whole = value.is_integer() and abs(value) <= _LAST_EXACT
        return int(value) if is_whole and "integer" in types and "number" not in types else value
    if isinstance(value, list):
        items = [one.get("items") for one in found]
        return [_whole(item, items, root) for item in value]
    return {key: _whole(item, [_property(one, key) for one in found], root) for key, item in value.items()}


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    named = properties.get(name) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if named is None else named


def _is_required(tool: ToolSpec | None, parameter: str) -> bool:
    return tool is not None and parameter in _several(tool.parameters.get("required"))


def _as_json(text: str) -> Any:
    try:
        value, end = read_json(text, 0)
    except Malformed:
        return None
    return value if end == len(text) else None


def _alternatives(schemas: Iterable[Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas, and all that they refer to or combine."""
    waiting, found = list(schemas), dict[int, Mapping[str, Any]]()
    while waiting and len(found) < _MAX_SCHEMAS:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in found:
            continue
        found[id(schema)] = schema
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(_referred(root, reference))
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += _several(schema.get(key))
    return list(found.values())


def _types(schemas: Sequence[Mapping[str, Any]]) -> set[str]:
    """All JSON types that schemas may take; empty where they do not say."""
    types = {name for schema in schemas for name in _own_types(schema)}
    nullable = any(schema.get("nullable") is True for schema in schemas)
    return types | {"null"} if types and nullable else types


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    if declared is not None:
        return {declared} if isinstance(declared, str) else {str(one) for one in _several(declared)}
    values = _several(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    return {"null" if value is None else _JSON_TYPES.get(type(value), "") for value in values}


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference inside the schema (`#/$defs/Place`) points at; None where that is nothing."""
    place: Any = root
    for part in reference.removeprefix("#/").split("/"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place
