"""Tool calls against their schemas: whatever a call holds, the model is told in one short line."""

from __future__ import annotations

from typing import Any

import pytest

from envs.tools import call_error, check_tools
from envs.types import ToolCall, ToolSpec

CITIES = [f"city {index}" for index in range(100)]


def tool(**properties: Any) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    return ToolSpec(name="pay", description="Pays.", parameters=parameters)


def told(spec: ToolSpec, **arguments: Any) -> str | None:
    return call_error(ToolCall(call_id="1", name=spec.name, arguments=arguments), [spec])


def test_a_number_too_large_to_check_is_the_call_s_fault() -> None:
    spec = tool(amount={"type": "number", "multipleOf": 0.01})
    assert told(spec, amount=10**400) == "error: pay: a number is too large; arguments: amount"
    assert told(spec, amount=1.25) is None


@pytest.mark.parametrize(
    ("schema", "value", "end"),
    [
        ({"type": "integer"}, "x" * 50_000, "xxx' is not of type 'integer'; arguments: a"),
        ({"type": "string", "maxLength": 5}, "x" * 50_000, "xxx' is too long; arguments: a"),
        ({"type": "string"}, ["x"] * 10_000, "'x'] is not of type 'string'; arguments: a"),
    ],
)
def test_a_long_argument_is_not_repeated(schema: dict[str, Any], value: Any, end: str) -> None:
    error = told(tool(a=schema), a=value)
    assert error is not None
    assert error.startswith("error: pay: ")
    assert "…" in error
    assert end.removesuffix("; arguments: a") + " in 'a'; arguments: a" in error
    assert len(error) < 400


def test_long_names_are_not_repeated() -> None:
    spec = tool(a={"type": "object", "additionalProperties": {"type": "integer"}})
    for error in (
        told(spec, **{"x" * 50_000: 1}),
        told(spec, a={"x" * 50_000: "no"}),
        call_error(ToolCall(call_id="1", name="x" * 50_000, arguments={}), [spec]),
    ):
        assert error is not None
        assert "…" in error
        assert len(error) < 500


def test_what_the_schema_says_is_told_whole() -> None:
    error = told(tool(city={"enum": CITIES}), city="x" * 50_000)
    assert error is not None
    assert f"is not one of {CITIES!r}" in error
    assert len(error) < 500 + len(repr(CITIES))


def test_a_short_message_is_whole() -> None:
    assert told(tool(a={"type": "string"}), a=3) == "error: pay: 3 is not of type 'string' in 'a'; arguments: a"


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "dict"}, "['properties']['a']['type']: 'dict' is not valid"),
        ({"type": "number", "multipleOf": 0}, "['properties']['a']['multipleOf']: 0 is less than"),
        ({"type": "string", "pattern": "("}, "['properties']['a']['pattern']: '(' is not a 'regex'"),
    ],
)
def test_a_schema_that_is_none_names_its_tool(schema: dict[str, Any], where: str) -> None:
    with pytest.raises(ValueError, match=r"^tool 'pay': parameters") as caught:
        check_tools([tool(a={"type": "string"}), tool(a=schema)])
    assert where in str(caught.value)


def test_right_schemas_pass() -> None:
    check_tools([tool(), tool(a={"type": ["string", "null"]})])


@pytest.mark.parametrize("wanted", [{"type": "integer"}, {"type": "string", "enum": ["a", "b"]}])
def test_nullable_takes_null_and_nothing_else_more_b08(wanted: dict[str, Any]) -> None:
    assert told(tool(n=wanted), n=None) is not None
    assert told(tool(n=wanted | {"nullable": True}), n=None) is None
    assert told(tool(n=wanted | {"nullable": True}), n=[]) is not None
    nested = tool(n={"type": "array", "items": wanted | {"nullable": True}})
    assert told(nested, n=[None]) is None
