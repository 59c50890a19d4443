"""Words of the command line that ``sdp launch --dry-run`` prints."""

import shlex

import pytest
from sdp.launcher.cluster.rank import decode
from sdp.tools.cli import main


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["launch", "--dry-run", *words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def command_of(printed: str) -> list[str]:
    """Split the first line as a shell does; leave out ``env`` and its variables."""
    words = shlex.split(printed.partition("\n")[0])
    return words[next(index for index, word in enumerate(words) if word != "env" and "=" not in word) :]


def train_words(printed: str) -> list[str]:
    """Return the words that the last rank's command hands to ``sdp train``."""
    words = command_of(printed)
    last = max(index for index, word in enumerate(words) if word.endswith("cluster.rank"))
    return [decode(word) for word in words[last + 3 :]]
