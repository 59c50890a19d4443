"""A bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys

import pytest
from sdp.tools.train.progress import progress


def train(total: int = 5, start: int = 0, enabled: bool = True, every: int = 2) -> None:
    shown = progress(total, start, enabled, every)
    for step in range(start + 1, total + 1):
        shown.update(step, 1.23456, 4321.0, {"lr": 0.00123456})
    shown.print("held-out loss 3.2")
    shown.close()


def test_plain_lines_every_few_steps_and_at_the_end(capsys: pytest.CaptureFixture[str]):
    train()
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "step 2/5  loss 1.2346  tokens/s 4,321  lr 0.001235",
        "step 4/5  loss 1.2346  tokens/s 4,321  lr 0.001235",
        "step 5/5  loss 1.2346  tokens/s 4,321  lr 0.001235",
        "held-out loss 3.2",
    ]
    assert captured.out == ""


def test_a_bar_on_a_terminal_starts_where_the_run_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(total=5, start=3)
    captured = capsys.readouterr()
    assert "held-out loss 3.2\n" in captured.err
    assert captured.out == ""
    assert "3/5" in captured.err and "5/5" in captured.err
    assert "loss=1.2346" in captured.err and "tokens/s=4,321" in captured.err


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(enabled=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
