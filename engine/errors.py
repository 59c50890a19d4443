"""Exceptions whose class says whose fault it is: every ``SDPError`` is the user's to mend and ends a command with exit code 2.

The exceptions end with exit code 1: :class:`DivergenceError`, the holders of a unit disagree, :class:`DivergedError`, the loss is
no number any more, :class:`OutOfMemoryError`, and :class:`PeerLostError`.
Messages are one line: what is wrong, where, and what to do.
"""

import difflib
from collections.abc import Iterable


class SDPError(Exception):
    """Base of all errors that SDP raises on purpose.

    ``exit_code`` is the status with which the command line ends: 2 for the user's mistake, 1 for a failure of the program.
    """

    exit_code = 2


class ConfigError(SDPError):
    """The JSON file, a ``--set`` override or an argument cannot be honoured."""


class PlacementError(SDPError):
    """No placement satisfies what was asked for, or an explicit one breaks a guarantee."""


class ModelError(SDPError):
    """The model cannot be cut into units, or its weights do not fit."""


class DataError(SDPError):
    """A corpus, shard, index or tokenizer is missing, damaged or does not match."""


class LaunchError(SDPError):
    """Processes cannot be started, or the environment that started them is incomplete."""


class CheckpointError(SDPError):
    """A checkpoint is missing, damaged, foreign or does not match the run."""


class DivergedError(SDPError):
    """Loss or gradient is no number any more."""

    exit_code = 1


class OutOfMemoryError(SDPError):
    """A device has no memory left for the run."""

    exit_code = 1


class PeerLostError(SDPError):
    """Another rank is gone, and this one cannot go on; never the cause of a run's end."""

    exit_code = 1


class DivergenceError(SDPError):
    """The holders of a unit no longer have bitwise equal weights or optimizer state."""

    exit_code = 1


def suggestion(key: str, candidates: Iterable[str]) -> str:
    """``", did you mean X?"`` for the closest candidate, else an empty string."""
    close = difflib.get_close_matches(key, list(candidates), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""
