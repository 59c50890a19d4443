"""The counts of DeepSpeed's unit tests in docs/deepspeed.md are those of the committed list."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from sdp.tests.deepspeed_compat.unit_tests import FILES, VERDICTS, find_reason


def test_the_page_has_the_counts_of_the_list() -> None:
    verdicts: dict[str, str] = json.loads(VERDICTS.read_text(encoding="utf-8"))
    assert {name.partition("::")[0] for name in verdicts} == set(FILES)
    counts: Counter[str] = Counter()
    for text in verdicts.values():
        kind, _, rest = text.partition(": ")
        counts[rest.partition(": ")[0] if kind == "failed" else kind] += 1
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    rows = page.partition("| DeepSpeed's unit tests |")[2].partition("\n\n")[0]
    for verdict, count in counts.items():
        assert f"| {verdict} | {count} |" in rows
    assert f"{len(verdicts)} tests" in page


def test_the_reason_is_that_of_the_error_not_of_a_line_of_the_sources() -> None:
    """multiprocessing, which hands on the error of a rank, has a line that raises TimeoutError."""
    text = """RuntimeError: AssertionError:
        if not self.ready():
            raise TimeoutError
        else:
>           raise self._value
E           RuntimeError: AssertionError: 4 is not 5

pool.py:774: RuntimeError"""
    assert find_reason(text) == "differs: RuntimeError: AssertionError: 4 is not 5"
    assert find_reason("E   RuntimeError: NotOffered: deepspeed.x.Y").startswith("uses an internal of DeepSpeed")
