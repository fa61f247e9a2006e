"""Whole numbers that a schema wants as integers, wherever in the arguments they stand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from data.tool_formats.values import whole_numbers
from envs.types import ToolSpec
from tests.contracts.tool_formats import values
from tests.data.test_types import no_clock

INTEGER = {"type": "integer"}


def read(schema: Any, value: Any) -> Any:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"Id": INTEGER}}
    return whole_numbers({"x": value}, ToolSpec(name="f", description="", parameters=parameters))["x"]


@pytest.mark.parametrize(
    ("schema", "value", "whole"),
    [
        (INTEGER, 5.0, 5),
        (INTEGER, -0.0, 0),
        (INTEGER, 5.5, 5.5),
        (INTEGER, True, True),
        (INTEGER, "5.0", "5.0"),
        (INTEGER, 1e22, 1e22),
        ({"type": ["integer", "null"]}, 5.0, 5),
        ({"type": ["integer", "number"]}, 5.0, 5.0),
        ({"type": "number"}, 5.0, 5.0),
        ({"$ref": "#/$defs/Id"}, 5.0, 5),
        ({"enum": [1, 2]}, 2.0, 2),
        ({}, 5.0, 5.0),
        (True, 5.0, 5.0),
        ({"type": "array", "items": INTEGER}, [1.0, 2.5, "3.0"], [1, 2.5, "3.0"]),
        ({"type": "object", "properties": {"a": INTEGER}}, {"a": 1.0, "b": 1.0}, {"a": 1, "b": 1.0}),
        ({"type": "object", "additionalProperties": INTEGER}, {"a": 1.0}, {"a": 1}),
        ({"anyOf": [{"items": {"$ref": "#/$defs/Id"}}, {"type": "null"}]}, [[1.0], 1.0], [[1.0], 1]),
    ],
    ids=str,
)
def test_a_whole_number_becomes_the_integer_that_the_schema_wants_b08(schema: Any, value: Any, whole: Any) -> None:
    assert repr(read(schema, value)) == repr(whole)


def test_schemas_that_refer_to_themselves_end() -> None:
    tree: dict[str, Any] = {"anyOf": [{"$ref": "#/properties/x"}, INTEGER], "items": {"$ref": "#/properties/x"}}
    tree["anyOf"] += [{"properties": {"a": {"$ref": "#/properties/x"}}} for _ in range(20)]
    value: Any = 5.0
    for _ in range(20):
        value = {"a": [value]}
    assert "5.0" not in repr(read(tree, value))


schemas = st.recursive(
    st.sampled_from([INTEGER, {"type": "number"}, {"type": "string"}, {"$ref": "#/$defs/Id"}, {"enum": [1, 2.0]}, {}]),
    lambda inner: (
        st.builds(lambda one: {"type": "array", "items": one}, inner)
        | st.builds(lambda one: {"type": "object", "properties": {"a": one}, "additionalProperties": one}, inner)
        | st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@no_clock
@given(schema=schemas, value=values)
def test_no_value_changes_what_it_is_nor_whether_it_fits(schema: Any, value: Any) -> None:
    whole = read(schema, value)
    assert whole == value
    check = Draft202012Validator({**schema, "$defs": {"Id": INTEGER}})
    assert check.is_valid(whole) == check.is_valid(value)
