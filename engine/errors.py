"""The exceptions of SDP, and functions that format messages.

A message is one line that says what is wrong, where, and what to do. The class chooses the exit
code of the command line: 2 for what the user can correct, and 1 for a run that failed.
"""

import difflib
import errno
import re
from collections.abc import Iterable

MOST_QUOTED = 200  # characters of an input value in a message
# A full disk, the user's quota, or the limit for the size of a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_MESSAGE = 4000  # characters of a message, if a value in it was not shortened
# Control characters without the line feed and the tab, halves of surrogate pairs, and characters
# that reverse the direction of the text that follows.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class SDPError(Exception):
    """The base class of all errors that SDP raises on purpose.

    ``exit_code`` is the status with which the command line ends: 2 for the user's mistake, 1 for a
    run that failed.
    """

    exit_code = 2


class ConfigError(SDPError):
    """A setting in the JSON file, a ``--set`` override or an argument is not valid."""


class PlacementError(SDPError):
    """No placement fits the configuration, or the placement in the configuration is not allowed."""


class ModelError(SDPError):
    """The model cannot be cut into units, or its weights do not fit."""


class DataError(SDPError):
    """A corpus, shard, index or tokenizer is missing, damaged or does not match."""


class LaunchError(SDPError):
    """Processes cannot be started, or the environment that started them is incomplete."""


class CheckpointError(SDPError):
    """A checkpoint is missing, damaged, of another format, or does not match the run."""


class WriteError(SDPError):
    """A file cannot be written, most often because the disk is full."""

    @classmethod
    def of(cls, path: object, error: OSError) -> "WriteError":
        """Return the error for a file at ``path``, with the reason from the operating system."""
        remedy = "; free space on the disk" if error.errno in NO_ROOM else ""
        return cls(f"{path}: cannot be written ({error.strerror}){remedy}")


class StoreError(SDPError, OSError):
    """An object store does not answer, refuses a request, or lacks its package."""


class NonFiniteError(SDPError):
    """The loss or the gradient became NaN or infinite."""

    exit_code = 1


class SpikeError(SDPError):
    """The loss or the gradient norm spiked, and ``training.on_spike`` forbids the step.

    The weights are those before the step.
    """

    exit_code = 1


class OutOfMemoryError(SDPError):
    """A device ran out of memory."""

    exit_code = 1


class PeerLostError(SDPError):
    """Another rank has ended, so this rank cannot continue. The log of that rank has the cause."""

    exit_code = 1


class ServiceError(SDPError):
    """In a run with an anchor service, the service or a group cannot continue."""

    exit_code = 1


class HolderMismatchError(SDPError):
    """The holders of a unit no longer have bitwise equal weights or optimizer state."""

    exit_code = 1


# Names of earlier versions, which scripts may still use.
DivergedError = NonFiniteError
DivergenceError = HolderMismatchError


def suggestion(key: str, candidates: Iterable[str]) -> str:
    """Return ``", did you mean X?"`` for the closest candidate, or an empty string."""
    close = difflib.get_close_matches(key, list(candidates), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def escape(text: str) -> str:
    """Replace characters that could control a terminal, such as ESC, by their Python escapes.

    Line feeds and tabs stay, because a message may have several lines.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shorten(text: object, most: int = MOST_QUOTED) -> str:
    """Return ``text`` so that it can be printed in a message: on one line, and not too long.

    After ``most`` characters the text is cut, and the number of missing characters is added.
    """
    text = str(text)
    left_out = len(text) - most
    kept = escape(text[:most]).replace("\n", "\\n").replace("\t", "\\t")
    return f"{kept}… ({left_out:,} more characters)" if left_out > 0 else kept


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or without a message the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def quote(value: object) -> str:
    """Return ``repr(value)`` for a message. A long value is cut."""
    if isinstance(value, str):
        left_out = len(value) - MOST_QUOTED
        return repr(value[:MOST_QUOTED]) + (f"… ({left_out:,} more characters)" if left_out > 0 else "")
    try:
        return shorten(repr(value))
    except ValueError:  # Python does not write whole numbers of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to write"


def format_error(error: BaseException) -> str:
    """Return the message of ``error`` on one printable line, without the middle if it is long."""
    text = escape(" ".join(str(error).split()))
    left_out = len(text) - MOST_MESSAGE
    if left_out <= 0:
        return text
    # The end says what to do, so the middle is left out.
    end = MOST_MESSAGE // 4
    return f"{text[: MOST_MESSAGE - end]}… ({left_out:,} more characters) …{text[-end:]}"
