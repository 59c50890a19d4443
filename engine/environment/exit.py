"""The end of a process that used gloo, whose threads may still let go of tensors.

That takes the interpreter's lock, and a thread that asks for it while the interpreter ends aborts the process ("terminate called without
an active exception"), the work done and written (github.com/pytorch/pytorch/issues/190489, /pull/179291). The command line knows its exit
code and leaves without ending the interpreter; a script's is not known before the end, so that its threads are given time instead.
"""

from __future__ import annotations

import atexit
import gc
import time

_SECONDS = 0.25  # they need microseconds, once they have a core

_watched = False


def watch() -> None:
    """Have this process wait for its threads before its interpreter ends; once, whoever asks."""
    global _watched
    if not _watched:
        _watched = True
        atexit.register(_let_go)


def leaves_at_once() -> None:
    """Of a process that does not end its interpreter: nothing is waited for."""
    global _watched
    _watched = True


def _let_go() -> None:
    gc.collect()  # what cycles keep would be let go of later
    time.sleep(_SECONDS)  # without the interpreter's lock
