"""Every token of two small conversations, its author and whether it is trained are as in the tables."""

from __future__ import annotations

import pytest

from tests.golden.tables import FOLDER, TABLES, table


@pytest.mark.parametrize("name", TABLES)
def test_tokens_and_masks_are_those_of_the_table(name: str) -> None:
    expected = (FOLDER / f"{name}.tsv").read_text(encoding="utf-8")
    assert table(TABLES[name]()).splitlines() == expected.splitlines(), "python -m tests.golden.tables writes it again"
