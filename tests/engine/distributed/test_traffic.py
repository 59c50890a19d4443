"""Bytes sent in a step equal the formula."""

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import Traffic, sent_bytes
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.placement import WAYS, Placement, Refresh
from sdp.tests.support import models
from sdp.tests.support.cases import Case, native
from sdp.tests.support.ranks import RankPool


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_tensor_parallel_bytes_by_hand(ranks: RankPool, checkpointing: Any) -> None:
    """Hidden states are gathered before attention, feed-forward and head, and scattered after
    attention, feed-forward and embedding; backward does the converse of each. Recomputation ends
    with the last activation that backward needs: one scatter fewer.
    """
    case = Case(2, 1, 0, 2, model="even-llama", tp=2, checkpointing=checkpointing)
    tokens = 2 * models.TOKENS
    hidden = 4 * 12 * tokens
    for rank, result in enumerate(native(ranks, case)):
        held = 3  # of the four layers, in either group
        recomputed = held if checkpointing == "full" else 0
        gathers, scatters = 4 * held + 2 + 2 * recomputed, 4 * held + 2 + recomputed
        for counted in result.traffic:
            sent = {
                kind.split("/")[1]: nbytes for kind, nbytes in counted.items() if kind.startswith("tensor parallel")
            }
            assert sent == {
                "all_gather": case.accumulation * gathers * hidden // 2,
                "reduce_scatter": case.accumulation * scatters * hidden // 2,
                "all_reduce": case.accumulation * 4 * (2 * tokens + 1),  # a maximum and a sum a token, and the loss
            }, f"rank {rank}"


def _numel(prefixes: tuple[str, ...]) -> int:
    return sum(p.numel() for name, p in models.mlp().named_parameters() if name.startswith(prefixes))


def test_bytes_between_groups_by_hand(ranks: RankPool) -> None:
    """Two groups of one rank: what both hold is all-reduced once, 2·(1/2) of its float32 bytes;
    what one holds is not sent.
    """
    result = native(ranks, Case(2, 1))[1]
    both = 4 * _numel(("stem", "head", "layers.1", "layers.2"))
    assert result.traffic[0] == {"between groups/all_reduce": both, "control/all_reduce": 16}


@pytest.mark.parametrize(("bf16", "nbytes"), [(False, 4), (True, 2)])
def test_bytes_of_frozen_copies_by_hand(ranks: RankPool, bf16: bool, nbytes: int) -> None:
    """Each of two groups lacks a block that the other holds alone and sends after the step, in
    compute precision.
    """
    case = (
        Case(2, 1, optimizer="sgd", steps=2, masking="backward", bf16=bf16) if bf16 else Case(2, 1, masking="backward")
    )
    both = 4 * _numel(("stem", "head", "layers.1", "layers.2"))
    sent = nbytes * _numel(("layers.0",))
    for result in native(ranks, case):
        expected = {"between groups/all_reduce": both, "between groups/broadcast": sent, "control/all_reduce": 16}
        assert result.traffic == [expected] * case.steps


def test_the_work_of_sending_is_spread_among_holders() -> None:
    """Every holder sends to its part of the groups without a unit, the same for all units of a
    holder set and, here, for all sets.
    """
    holders = {0: [0, 1], 1: [1, 2], 2: [2, 3], 3: [0, 3], 4: [0, 1], 5: [0, 1, 2, 3]}
    config = Case(4, 1, masking="backward").config()
    config["sdp"]["placement"] = {f"layers.{index}": held for index, held in holders.items()}
    layout = Layout.of(models.mlp(blocks=6), load_config(config), Mesh(4))
    found = [(refresh.block, refresh.source, refresh.members) for refresh in layout.refreshes]
    assert found == [
        ("layers.0", 0, (0, 2)),
        ("layers.0", 1, (1, 3)),
        ("layers.1", 1, (1, 3)),
        ("layers.1", 2, (0, 2)),
        ("layers.2", 2, (0, 2)),
        ("layers.2", 3, (1, 3)),
        ("layers.3", 0, (0, 2)),
        ("layers.3", 3, (1, 3)),
        ("layers.4", 0, (0, 2)),
        ("layers.4", 1, (1, 3)),
    ]


@pytest.mark.parametrize("groups, holders", [(8, 2), (8, 3), (8, 6), (16, 8), (3, 1)])
def test_every_group_without_a_unit_receives_it_once(groups: int, holders: int) -> None:
    """As many holders as there are receivers, or all, send, none to more groups than it must, all
    nearly as much; of cyclic holder
    sets of half the groups each group sends to one other and receives from one.
    """
    sets = [tuple(sorted((first + place) % groups for place in range(holders))) for first in range(groups)]
    placement = Placement(groups, tuple(f"u{index}" for index in range(groups)), tuple(sets), (1,) * groups)
    sends, partners = Counter[int](), defaultdict(set)
    for held, deliveries in placement.deliveries.items():
        received = [group for delivery in deliveries for group in delivery.members if group != delivery.source]
        assert sorted(received) == [group for group in range(groups) if group not in held]
        assert (
            len({delivery.source for delivery in deliveries} & set(held))
            == min(holders, groups - holders)
            == len(deliveries)
        )
        assert max(len(delivery.members) for delivery in deliveries) - 1 == -(-(groups - holders) // len(deliveries))
        for delivery in deliveries:
            sends.update(group for group in delivery.members if delivery.sent_by(group))
            for group in delivery.members:
                partners[group].add((delivery.source, delivery.members))
    assert sum(sends.values()) == groups * (groups - holders)
    assert max(sends.values()) - min(sends.values()) <= 2
    if groups == 2 * holders:
        assert [len(ways) for ways in partners.values()] == [2] * groups


def test_what_would_need_too_many_communicators_is_sent_by_one_holder() -> None:
    """Of 120 sets of 3 of 10 groups some are shared out, those of the most parameters first, and
    every set is served.
    """
    sets = tuple(itertools.combinations(range(10), 3))
    costs = tuple(range(len(sets), 0, -1))
    placement = Placement(10, tuple(map(str, sets)), sets, costs)
    served = {held: len(deliveries) for held, deliveries in placement.deliveries.items()}
    assert served[sets[0]] == 3
    assert served[sets[-1]] == 1
    shared = {
        (d.source, d.members) for held, all_of in placement.deliveries.items() if served[held] > 1 for d in all_of
    }
    assert 3 < len(shared) <= WAYS * 10
    for held, deliveries in placement.deliveries.items():
        received = [group for delivery in deliveries for group in delivery.members if group != delivery.source]
        assert sorted(received) == [group for group in range(10) if group not in held]


def test_a_ring_passes_on_to_all_but_the_last() -> None:
    refresh = Refresh(3, (0, 1, 3), "layers.0", ("layers.0.weight",))
    assert [refresh.sent_by(group) for group in range(4)] == [True, False, False, True]  # 3 to 0 to 1


def test_bytes_inside_groups_by_hand(ranks: RankPool) -> None:
    """One group of four ranks: all shards are padded to the first one's rows, 13 rows as 4 × 4."""
    padded = sum(-(-p.shape[0] // 4) * 4 * p[0].numel() for p in models.mlp().parameters()) * 4
    result = native(ranks, Case(1, 4, 3, 3, placement="full"))[3]
    assert result.traffic[0] == {
        "inside groups/all_gather": 6 * padded * 3 // 4,
        "inside groups/reduce_scatter": 3 * padded * 3 // 4,
        "control/all_reduce": 24,
    }


def test_shares_of_ring_algorithms() -> None:
    assert sent_bytes("all_reduce", 100, 4) == 150
    assert sent_bytes("all_gather", 100, 4) == sent_bytes("reduce_scatter", 100, 4) == 75
    assert sent_bytes("broadcast", 100, 4) == 100
    assert sent_bytes("all_reduce", 100, 1) == 0
    traffic = Traffic()
    for ranks in (2, 3, 3):
        traffic.record("between groups", "all_reduce", 100, range(ranks))
    assert traffic.by_kind() == {"between groups/all_reduce": 367}  # 100 + 2 · 400/3, rounded once
    traffic.reset()
    assert traffic.by_kind() == {}
