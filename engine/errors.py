"""Exceptions whose class says whose fault an error is.

The user can correct most of these errors, and the command line then ends with exit code 2. Four
classes end with exit code 1, because the program failed: :class:`HolderMismatchError`,
:class:`NonFiniteError`, :class:`OutOfMemoryError` and :class:`PeerLostError`. A message is one
line. It says what is wrong, where, and what to do.
"""

import difflib
from collections.abc import Iterable


class SDPError(Exception):
    """Base of all errors that SDP raises on purpose.

    ``exit_code`` is the status with which the command line ends: 2 for the user's mistake, 1 for a
    failure of the program.
    """

    exit_code = 2


class ConfigError(SDPError):
    """The JSON file, a ``--set`` override or an argument is not valid."""


class PlacementError(SDPError):
    """No placement meets the configuration, or a named placement breaks a guarantee."""


class ModelError(SDPError):
    """The model cannot be cut into units, or its weights do not fit."""


class DataError(SDPError):
    """A corpus, shard, index or tokenizer is missing, damaged or does not match."""


class LaunchError(SDPError):
    """Processes cannot be started, or the environment that started them is incomplete."""


class CheckpointError(SDPError):
    """A checkpoint is missing, damaged, foreign or does not match the run."""


class NonFiniteError(SDPError):
    """The loss or the gradient became NaN or infinite."""

    exit_code = 1


class OutOfMemoryError(SDPError):
    """A device ran out of memory."""

    exit_code = 1


class PeerLostError(SDPError):
    """Another rank is gone, so this rank cannot continue. The other rank has the cause."""

    exit_code = 1


class HolderMismatchError(SDPError):
    """The holders of a unit no longer have bitwise equal weights or optimizer state."""

    exit_code = 1


# The names of earlier versions.
DivergedError = NonFiniteError
DivergenceError = HolderMismatchError


def suggestion(key: str, candidates: Iterable[str]) -> str:
    """Return ``", did you mean X?"`` for the closest candidate, or an empty string."""
    close = difflib.get_close_matches(key, list(candidates), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""
