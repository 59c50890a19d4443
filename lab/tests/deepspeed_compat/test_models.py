"""The table of models in docs/units.md, for some of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sdp.tests.support.ranks import RankPool

from lab.deepspeed_compat.models import LANGUAGE, OTHERS, find_reasons

pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")


def _rows() -> dict[str, list[str]]:
    """Return the cells of each model. A row of the table names all models with the same cells."""
    page = (Path(__file__).parents[3] / "docs" / "units.md").read_text(encoding="utf-8")
    rows: dict[str, list[str]] = {}
    for line in page.partition("| models | blocks, forward |")[2].splitlines()[2:]:
        if line.startswith("|"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows |= dict.fromkeys(names.split(", "), cells)
    return rows


def test_the_table_has_every_model() -> None:
    assert sorted(_rows()) == sorted(["LLaMA (ours)", *LANGUAGE, *OTHERS])
    assert len(_rows()) == 25


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.parametrize("name", ["GPT-2", "GPT-J", "ALBERT", "T5"])
def test_a_row_of_the_table_is_true(ranks: RankPool, name: str) -> None:
    reasons = find_reasons(ranks, name)
    assert ["no" if reason else "yes" for reason in reasons] == _rows()[name]
    assert not any("\n" in reason for reason in reasons if reason)
