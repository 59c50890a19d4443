"""A rank that a launcher started finds its local rank and its GPUs."""

import pytest
from sdp.engine.errors import LaunchError
from sdp.launcher.cluster.rank import rank_variables

pytestmark = pytest.mark.usefixtures("folder")


def open_mpi(monkeypatch: pytest.MonkeyPatch, rank: int, local: int, local_size: int, size: int = 5) -> None:
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": local_size}
    for name, value in values.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def test_rank_completes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch, rank=3, local=1, local_size=3)
    settings = rank_variables([[0, 1], [1, 2, 3]], "h", "7")
    assert settings == {
        "MASTER_ADDR": "h", "MASTER_PORT": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3",
        "CUDA_VISIBLE_DEVICES": "1,2,3",
    }  # fmt: skip


def test_rank_on_another_host_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    open_mpi(monkeypatch, rank=3, local=0, local_size=2)
    with pytest.raises(LaunchError, match="Open MPI gave rank 3 the local rank 0, but 1 on host number 1 was planned"):
        rank_variables([[0, 1], [1, 2, 3]], "h", "7")
    open_mpi(monkeypatch, rank=3, local=0, local_size=2, size=4)
    with pytest.raises(LaunchError, match="started 4 processes, but 5 were planned"):
        rank_variables([[0, 1], [1, 2, 3]], "h", "7")


def test_local_ranks_of_unequal_hosts_under_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed numbers ranks 2, 3, 4 of hosts with 2 and 3 slots as 2, 0, 1."""
    values = {
        "RANK": 2, "WORLD_SIZE": 5, "LOCAL_RANK": 2, "LOCAL_SIZE": 3, "CROSS_RANK": 1, "MASTER_ADDR": "h",
        "MASTER_PORT": 7,
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    assert rank_variables([[0, 1], [0, 1, 2]], "h", "7")["LOCAL_RANK"] == "0"
