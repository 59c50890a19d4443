"""Planned and measured memory of tiny models agree, and a plan that is wrong is said to be."""

from __future__ import annotations

from lab.memory import KINDS, Task, measure, report

LLAMA = {"name": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
         "num_attention_heads": 4}  # fmt: skip


def test_a_real_step_needs_what_was_planned() -> None:
    row = measure(Task(LLAMA, 4, 64, 4), 0.5, "block", "backward")
    assert row["placement"] == "balanced" and all(row[kind][0] > 0 for kind in KINDS)
    text, is_within = report({"llama": [row]})
    assert is_within and text.splitlines()[-1].startswith("largest deviation ")
    row["frozen"][1] = int(1.04 * row["frozen"][1]) + 1
    text, is_within = report({"llama": [row]})
    assert not is_within and text.endswith("(frozen of llama, 0.5 block backward): NOT within 3%")
