"""The methods that ``sdp bench`` compares, and their names."""

from __future__ import annotations

from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tests.support.bench_configs import CONFIG
from sdp.tools.bench.methods import DENSE, default_methods, variant, why_not


def test_a_method_names_its_local_steps() -> None:
    config = load_config(CONFIG)
    sync = variant("sdp-neuron-backward-0.5-local32-f4-o2-int8", config, 4).sdp.sync
    assert sync is not None
    assert (sync.every, sync.fragments, sync.overlap, sync.compression) == (32, 4, 2, "int8")
    dense = variant("diloco", config, 4).sdp
    assert dense.groups == 4 and dense.capacity == 1.0 and dense.sync is not None and dense.sync.every == 50
    with pytest.raises(ConfigError, match="not divisible by fragments"):
        variant("diloco-local32-f5", config, 4)


def test_defaults_are_all_methods_at_the_capacity() -> None:
    config = load_config(CONFIG)
    names = default_methods(config)
    assert names[-1] == "sdp-neuron-backward-0.5"
    assert len(names) == len(set(names)) == len(DENSE) + 4
    assert variant("sdp-neuron-backward-0.75", config, 4).sdp.masking == "backward"
    assert why_not("hsdp", config, 3) is not None
    assert why_not("hsdp", config, 4) is None


@pytest.mark.parametrize("capacity", [0.3333333, 0.33333334, 1.0, 1e-05])
def test_a_default_method_is_named_by_all_of_its_capacity(capacity: float) -> None:
    config = load_config(CONFIG | {"sdp": {"groups": 4, "capacity": capacity}})
    of_sdp = default_methods(config)[len(DENSE) :]
    assert len(set(of_sdp)) == 4
    assert all(variant(name, config, 4).sdp.capacity == capacity for name in of_sdp)


@pytest.mark.parametrize(
    "listed",
    [
        {"placement": {f"layers.{layer}": [0, 1] for layer in range(4)}},
        {"profile": [4, 2, 1, 1]},
        {"capacity": [0.5] * 4},
    ],
)
def test_holders_that_are_listed_go_without_the_name_of_a_capacity(listed: dict[str, Any]) -> None:
    assert default_methods(load_config(CONFIG | {"sdp": {"groups": 4} | listed})) == [*DENSE, "sdp"]
