"""How to start this very package in another process."""

from __future__ import annotations

import site
import sys
from pathlib import Path

from ..engine.environment.process import search_path_settings

PACKAGE = __name__.partition(".")[0]  # ``sdp``


def own_command() -> list[str]:
    """The command that runs this package's command line."""
    # -P: a folder "sdp" in the working directory must not be imported in place of this package.
    return [sys.executable, "-P", "-m", PACKAGE]


def search_path() -> dict[str, str]:
    """The variables under which a child process imports this very package.

    A child finds an installed package, editable or not, without help. If this process found the
    package on its search path, the child needs the folder above the package on PYTHONPATH.
    site-packages must not be put there, because PYTHONPATH goes before the standard library.
    """
    package = Path(__file__).absolute().parent.parent
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if package.name != PACKAGE or str(package.parent) in installed:
        return {}
    return search_path_settings(package.parent)
