"""A returning group gets its state from all of its holders, in few messages."""

from __future__ import annotations

import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.elastic import returning
from sdp.engine.elastic.returning import sources_of
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import SHARED
from sdp.models.registry import build_model


def layout_of(placement: dict[str, list[int]], groups: int) -> Layout:
    model = {"name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": len(placement)}
    config = load_config(
        {"sdp": {"groups": groups, "placement": placement}, "model": {**model, "num_attention_heads": 2}}
    )
    with torch.device("meta"):
        built = build_model(config.model, vocab_size=32)
    return Layout.of(built, config, Mesh(groups))


def test_units_come_from_all_holders_that_have_state() -> None:
    layout = layout_of({f"layers.{layer}": [0, 1, 2, 3] for layer in range(9)}, groups=4)
    sent = sources_of(layout, [3])
    assert {receiver for _, receiver in sent} == {3}
    counts = sorted(len([name for name in names if name != SHARED]) for names in sent.values())
    assert counts == [3, 3, 3] or counts == [2, 3, 4], "the shared part counts, too"
    assert sum(map(len, sent.values())) == 10
    assert {source for source, _ in sources_of(layout, [1, 3])} == {0, 2}


def test_units_without_a_holder_that_has_state_are_not_sent() -> None:
    layout = layout_of({"layers.0": [0, 1], "layers.1": [1, 2], "layers.2": [0, 2]}, groups=3)
    sent = sources_of(layout, [1, 2])
    assert {name for names in sent.values() for name in names} == {SHARED, "model.layers.0", "model.layers.2"}
    assert sent[0, 1] == [SHARED, "model.layers.0"] and sent[0, 2] == [SHARED, "model.layers.2"]


def test_tensors_are_packed_into_messages_of_a_limited_size() -> None:
    size = returning.MESSAGE_BYTES // 4
    tensors = [torch.empty(count, device="meta") for count in (size // 2, size // 2, 0, 10, 20, 2 * size, 5)]
    found = [[tensor.numel() for tensor in pack] for pack in returning.packs(tensors)]
    assert found == [[size // 2, size // 2], [10, 20, 2 * size], [5]]
