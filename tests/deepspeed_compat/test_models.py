"""The table of models in docs/deepspeed.md, for some of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from sdp.tests.deepspeed_compat.models import CASES, LANGUAGE, OTHERS, find_reason

pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")


def _rows() -> dict[str, list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    lines = page.partition("| model | blocks, forward |")[2].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {first: rest for first, *rest in cells[: len(LANGUAGE) + len(OTHERS) + 1]}


def test_the_table_has_every_model() -> None:
    assert list(_rows()) == ["LLaMA (ours)", *LANGUAGE, *OTHERS]
    assert len(_rows()) == 25


@pytest.mark.parametrize("name", ["GPT-2", "GPT-J", "ALBERT", "T5"])
def test_a_row_of_the_table_is_true(name: str) -> None:
    reasons = [find_reason(name, *case) for case in CASES]
    assert ["no" if reason else "yes" for reason in reasons] == _rows()[name]
    assert not any("\n" in reason for reason in reasons if reason)
