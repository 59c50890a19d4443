"""Avoids a crash at interpreter exit in a process that used gloo.

gloo's worker threads may still be releasing tensors. Releasing a tensor needs the GIL. A thread
that asks for the GIL during finalisation aborts the process ("terminate called without an active
exception"). This happens although the work is done and written
(github.com/pytorch/pytorch/issues/190489, /pull/179291).

The command line knows its exit code and leaves without finalising the interpreter. The exit code
of a user's script is not known before its end, so its threads get time to finish instead.
"""

from __future__ import annotations

import atexit
import gc
import time

# The threads need microseconds once they have a core.
SECONDS = 0.25

_watched = False


def watch() -> None:
    """Make this process wait for its threads before its interpreter ends. Idempotent."""
    global _watched
    if not _watched:
        _watched = True
        atexit.register(wait_for_threads)


def leaves_at_once() -> None:
    """Declare that this process does not finalise its interpreter, so that it waits for nothing."""
    global _watched
    _watched = True


def wait_for_threads() -> None:
    """Release tensors, and let gloo's threads take the GIL."""
    gc.collect()  # otherwise tensors in reference cycles would be released later
    time.sleep(SECONDS)  # sleeping releases the GIL
