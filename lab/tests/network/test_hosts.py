"""The rates of links between hosts."""

from __future__ import annotations

import pytest
from sdp.engine.errors import ConfigError

from lab.network.hosts import Link


def test_links_are_tcs_rates() -> None:
    assert Link.parse("300mbit").bytes_per_second == 37.5e6
    assert Link.parse("1gbit").bytes_per_second == 125e6
    assert Link.parse("1.5Gbit/s").bits_per_second == 1.5e9
    for wrong in ("300", "300mbps", "-1mbit", "0gbit", "0.0mbit", "nanmbit", "nan", "1e400mbit", ""):
        with pytest.raises(ConfigError):
            Link.parse(wrong)
