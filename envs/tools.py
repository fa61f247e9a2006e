"""Checking a tool call before it runs: is the tool known, and do the arguments fit its schema? And is that a schema?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend

from envs.types import ToolCall, ToolSpec

_SHOWN = 200
"""Characters of what the model wrote that a message repeats; it knows the rest."""


Check = Callable[[Any, Any, Any, Mapping[str, Any]], Iterator[ValidationError]]


def _or_null(check: Check) -> Check:
    def checked(validator: Any, wanted: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
        if instance is not None or schema.get("nullable") is not True:
            yield from check(validator, wanted, instance, schema)

    return checked


# OpenAPI's `nullable`, which many tools' schemas have, is no word of JSON schema.
_Validator = extend(
    Draft202012Validator, {word: _or_null(Draft202012Validator.VALIDATORS[word]) for word in ("type", "enum")}
)


def check_tools(tools: Sequence[ToolSpec]) -> None:
    """Refuse tools whose parameters are no JSON schema, before a model is told of them.

    Raises:
        ValueError: the message names the tool, the place in its schema, and what is wrong there.
    """
    for tool in tools:
        try:
            Draft202012Validator.check_schema(dict(tool.parameters))
        except SchemaError as error:
            where = "".join(f"[{part!r}]" for part in error.path)
            raise ValueError(f"tool {tool.name!r}: parameters{where}: {error.message}; write a JSON schema") from error


def call_error(call: ToolCall, tools: Sequence[ToolSpec]) -> str | None:
    """One line that tells the model what is wrong with `call` and how to recover, or None when it is right.

    >>> tool = ToolSpec(name="add", description="", parameters={"type": "object", "required": ["x"]})
    >>> call_error(ToolCall(call_id="1", name="sum", arguments={}), [tool])
    "error: unknown tool 'sum'; tools: add"
    """
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return f"error: unknown tool {_cut(repr(call.name))}; tools: {', '.join(t.name for t in tools)}"
    names = ", ".join(tool.parameters.get("properties", {}))
    try:
        problem = best_match(_Validator(dict(tool.parameters)).iter_errors(dict(call.arguments)))
    except OverflowError:
        # An integer of hundreds of digits, where the schema wants a multiple of a fraction.
        return f"error: {call.name}: a number is too large; arguments: {names}"
    if problem is None:
        return None
    where = "".join(f" in {_cut(repr(part))}" for part in problem.path)
    # What the schema itself says, such as a list of the allowed values, is repeated whole.
    message = _cut(problem.message, tail=100 + len(repr(problem.validator_value)))
    return f"error: {call.name}: {message}{where}; arguments: {names}"


def _cut(text: str, tail: int = 0) -> str:
    """The text without its middle: the first `_SHOWN` characters and the last `tail` of it."""
    return text if len(text) <= _SHOWN + tail else f"{text[:_SHOWN]}…{text[len(text) - tail :]}"
