"""Bytes of state are those of arithmetic, and counted bytes those that the kernel saw."""

import json
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support import models, wire
from sdp.tests.support.cases import Case, native
from sdp.tests.support.forks.command import ForkedScript
from sdp.tests.support.ranks import RankPool


@pytest.mark.parametrize(
    ("optimizer", "tensors", "copies"),
    [("sgd", 0, None), ("momentum", 1, None), ("adamw", 2, None), ("adamw", 2, 4), ("sgd", 0, 2)],
)
def test_prediction_by_hand(ranks: RankPool, optimizer: Any, tensors: int, copies: int | None) -> None:
    """Group 0 lacks the last of four blocks, group 1 the first. ``copies``: bytes."""
    case = Case(2, 1, optimizer=optimizer, steps=2, masking="backward" if copies else "forward", bf16=copies == 2)
    everything = sum(p.numel() for p in models.mlp().parameters())
    block = sum(p.numel() for p in models.Block().parameters())
    held = everything - block
    expected = {
        "parameters": 4 * held,
        "gradients": 4 * held,
        "optimizer": 4 * held * tensors,
        "frozen": block * (copies or 0),
    }
    assert [result.measured for result in native(ranks, case)] == [expected, expected]
    assert [result.predicted for result in native(ranks, case)] == [expected, expected]


def test_shards_of_a_group_add_up(ranks: RankPool) -> None:
    results = native(ranks, Case(1, 4, 3, placement="full"))
    everything = 4 * sum(p.numel() for p in models.mlp().parameters())
    sizes = [result.measured["parameters"] for result in results]
    assert sum(sizes) == everything
    assert sizes[3] < sizes[0], "13 rows are cut as 4, 4, 4, 1"


# Gloo has no reduce-scatter of its own (it all-reduces and keeps a part), where the count is by
# ring algorithms, as NCCL has them: measured here, so that the difference is known.
GLOO_SENDS = {"reduce_scatter": 2.0}
HEADERS = 0.05  # TCP, IP and gloo's own headers, acknowledgements, and small control messages


def test_counted_bytes_are_on_the_wire() -> None:
    code, printed = ForkedScript(Path(wire.__file__)).end(timeout=500)
    if code == wire.FORBIDDEN:
        pytest.skip("this process may not make a network namespace: bytes on the wire are not checked here")
    assert code == 0, printed
    found = json.loads(printed.splitlines()[-1])
    for kind, ratio in found["collectives"].items():
        print(f"{kind}: {ratio:.3f} of the formula's bytes")
    for name, (sent, counted, quiet) in found["runs"].items():
        total = sum(counted.values())
        expected = sum(nbytes * GLOO_SENDS.get(kind.split("/")[1], 1.0) for kind, nbytes in counted.items())
        print(
            f"{name}: {sent / 1e6:.2f} MB on the wire, {total / 1e6:.2f} MB counted; {sent / expected:.4f} of what "
            "gloo should send"
        )
        assert quiet < 0.01 * total
        assert expected <= sent <= (1 + HEADERS) * expected, name
    for kind, ratio in found["collectives"].items():
        assert ratio == pytest.approx(GLOO_SENDS.get(kind, 1.0), rel=HEADERS), kind
