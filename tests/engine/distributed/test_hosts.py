"""What a layout makes of the hosts that its ranks are on."""

import pytest
from sdp.engine.distributed.mesh import split_tensor_group, told_apart


@pytest.mark.parametrize(("slots", "tp"), [([2, 2], 1), ([2, 2], 2), ([4, 4], 2), ([2, 4], 2), ([8], 8), ([8, 8], 8)])
def test_groups_inside_hosts(slots: list[int], tp: int) -> None:
    assert split_tensor_group([f"n{host}" for host, count in enumerate(slots) for _ in range(count)], tp) is None


@pytest.mark.parametrize(
    ("slots", "tp", "said"),
    [
        ([2, 2], 4, "ranks 0 to 3 are on n0 and n1"),
        ([3, 3], 2, "ranks 2 to 3 are on n0 and n1"),
        ([1, 1, 1], 3, "ranks 0 to 2 are on n0 and n1 and n2"),
        ([4, 2, 2], 4, "ranks 4 to 7 are on n1 and n2"),
    ],
)
def test_a_group_on_several_hosts(slots: list[int], tp: int, said: str) -> None:
    problem = split_tensor_group([f"n{host}" for host, count in enumerate(slots) for _ in range(count)], tp)
    assert problem is not None
    assert said in problem
    assert "activations in every layer" in problem


def test_machines_of_one_name_are_several_hosts() -> None:
    hosts = told_apart([("node", "x"), ("node", "x"), ("node", "y"), ("other", "x")])
    assert hosts == ["node (1)", "node (1)", "node (2)", "other"]
    problem = split_tensor_group(hosts, 4)
    assert problem is not None
    assert "ranks 0 to 3 are on node (1) and node (2) and other" in problem
    assert told_apart([("a", "x"), ("b", "y")]) == ["a", "b"]
