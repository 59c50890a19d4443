"""``sdp --version``: the versions of this package and of what it uses."""

from __future__ import annotations

import platform
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path


def versions() -> str:
    """Return them in one line."""
    return f"sdp {_own_version()}, Python {platform.python_version()}, torch {_version_of('torch')}"


def _own_version() -> str:
    """The version in the checkout's setup.cfg, because another release may be installed as well."""
    metadata = ConfigParser()
    metadata.read(Path(__file__).absolute().parent.parent / "setup.cfg", encoding="utf-8")
    return metadata.get("metadata", "version", fallback="") or _version_of("sdp-engine")


def _version_of(distribution: str) -> str:
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return "not installed"
