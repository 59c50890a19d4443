"""A bar on a terminal, plain lines elsewhere."""

import fcntl
import io
import os
import pty
import struct
import sys
import termios

import pytest
from sdp.launcher.fatal_errors import say
from sdp.tools.train.observer import Progress


def train(total: int = 5, start: int = 0, every: int = 2) -> None:
    shown = Progress(every)
    shown.on_start(start, total)
    for step in range(start + 1, total + 1):
        shown.on_step({"step": step, "loss": 1.23456, "tokens_per_second": 4321.0, "grad_norm": 2.0, "lr": 0.00123456})
    shown.on_evaluation({"step": total, "loss": 3.2, "subnetwork_losses": [3.0, 4.0]})
    shown.on_end()
    shown.close()


def test_plain_lines_every_few_steps_and_at_the_end(capsys: pytest.CaptureFixture[str]):
    train()
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "step 2/5  loss 1.2346  tokens/s 4,321  grad_norm 2  lr 0.001235",
        "step 4/5  loss 1.2346  tokens/s 4,321  grad_norm 2  lr 0.001235",
        "step 5/5  loss 1.2346  tokens/s 4,321  grad_norm 2  lr 0.001235",
        "step 5: held-out loss 3.2000 (full model), 3.5000 (mean of the groups' own subnetworks)",
    ]
    assert captured.out == ""


def test_a_bar_on_a_terminal_starts_where_the_run_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(total=5, start=3)
    captured = capsys.readouterr()
    assert "held-out loss 3.2000 (full model)" in captured.err
    assert captured.out == ""
    assert "3/5" in captured.err and "5/5" in captured.err
    assert "loss=1.2346" in captured.err and "tokens/s=4,321" in captured.err


def test_a_terminal_without_columns_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        train()
        monkeypatch.undo()
        assert os.read(ours, 4096).startswith(b"step 2/5  loss 1.2346  tokens/s 4,321")
    os.close(ours)


class Gone(io.StringIO):
    """A terminal whose other end is closed."""

    def __init__(self, *, is_bar: bool):
        super().__init__()
        self.isatty = lambda: is_bar  # type: ignore[method-assign]

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("terminal", [Gone(is_bar=False), Gone(is_bar=True), None], ids=["pipe", "bar", "closed"])
def test_training_goes_on_without_its_terminal(terminal: Gone | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    train()
    say("group 1 was lost")
