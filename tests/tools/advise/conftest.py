"""Candidates on a fast and on a slow link, planned once."""

from __future__ import annotations

import pytest
from sdp.engine.config.load import load_config
from sdp.tests.tools.advise.made_up import CONFIG, machine_with_link
from sdp.tools.advise.candidate import Candidate
from sdp.tools.advise.candidates import candidates


@pytest.fixture(scope="session")
def fast() -> list[Candidate]:
    found, _ = candidates(load_config(CONFIG), machine_with_link(1e15), 2)
    return found


@pytest.fixture(scope="session")
def slow() -> list[Candidate]:
    found, _ = candidates(load_config(CONFIG), machine_with_link(1e5), 2)
    return found
