"""The layout: the tables that all ranks compute from the full model, without a process group."""

from __future__ import annotations

from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import SHARED
from sdp.tests.support import models
from sdp.tests.support.cases import Case

NAMED = {"layers.0": [0], "layers.1": [1], "layers.2": [0, 1], "layers.3": [0, 1]}


def _layout(**section: Any) -> Layout:
    config = Case(2, 1).config("fsdp2")
    config["sdp"] |= {"placement": NAMED, **section}
    return Layout.of(models.Mlp(), load_config(config), Mesh(2))


def test_every_parameter_has_the_holders_of_its_unit() -> None:
    layout = _layout()
    assert list(layout.parameters) == [name for name, _ in models.Mlp().named_parameters()]
    for name, info in layout.parameters.items():
        unit = next((unit for unit in NAMED if name.startswith(f"{unit}.")), None)
        assert info.unit == (unit or SHARED)
        assert info.holders == tuple(NAMED[unit] if unit else (0, 1))
    assert {info.unit for info in layout.held(0)} == {"layers.0", "layers.2", "layers.3", SHARED}


def test_buckets_cover_every_parameter_once_and_have_one_holder_set() -> None:
    layout = _layout()
    buckets = layout.buckets(lambda name: False)
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(layout.parameters)
    assert all(layout.parameters[name].holders == bucket.holders for bucket in buckets for name in bucket.names)
    last = list(layout.parameters)[-1]
    assert last in buckets[0].names
    assert last in layout.buckets(lambda name: name == last)[-1].names


def test_only_backward_masking_keeps_frozen_copies() -> None:
    assert not list(_layout().frozen(0))
    assert not _layout().refreshes
    backward = _layout(masking="backward")
    assert {info.unit for info in backward.frozen(0)} == {"layers.1"}
    assert {(refresh.source, refresh.members, refresh.block) for refresh in backward.refreshes} == {
        (0, (0, 1), "layers.0"),
        (1, (0, 1), "layers.1"),
    }


def test_no_units_for_several_groups_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"sdp\.units"):
        _layout(units=[], placement="cyclic")
