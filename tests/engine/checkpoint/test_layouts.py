"""Checkpoints move between layouts, regimes and engines; weights and moments stay exact."""

from pathlib import Path
from typing import Any

import pytest
from sdp.engine.checkpoint.storage import dcp
from sdp.engine.checkpoint.storage.dcp import PIECE_BYTES, SafeReader
from sdp.tests.support.cases import Case
from sdp.tests.support.checkpoints import (
    SOURCE,
    TENSOR_SOURCES,
    assert_loaded,
    load_case,
    merge_moments,
    train_and_save,
)
from sdp.tests.support.ranks import RankPool

TARGETS = [
    pytest.param(SOURCE, marks=pytest.mark.slow),
    pytest.param(Case(4, 2, stage=3, optimizer="adamw", placement="mixed"), marks=pytest.mark.slow),
    Case(1, 4, stage=2, optimizer="adamw", placement="full"),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_checkpoint_moves_to_any_layout_exactly(ranks: RankPool, saved: Any, target: Case) -> None:
    folder, weights, moments = saved
    answers = ranks.run(load_case, target, folder, world=target.world)
    assert_loaded(answers, weights, moments)
    assert all(answer[2] == {"note": "kept"} for answer in answers)


PAIRS = [
    (Case(4, 1, stage=0, optimizer="momentum", placement="cyclic"),
        Case(1, 2, stage=3, optimizer="momentum", placement="full")),
    (Case(2, 2, stage=3, optimizer="adamw", masking="backward"), Case(4, 1, optimizer="adamw", placement="profile")),
    # Running statistics are those of first holders.
    (Case(2, 2, stage=3, optimizer="adamw", model="resnet-meta"),
        Case(1, 2, optimizer="adamw", placement="full", model="resnet-meta")),
    (Case(2, 1, optimizer="adamw", masking="backward", bf16=True, model="llama-tied"),
        Case(1, 2, optimizer="adamw", placement="full", model="llama-tied")),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_runs_of_other_regimes_continue_each_other(ranks: RankPool, tmp_path: Path, source: Case, target: Case) -> None:
    saved = ranks.run(train_and_save, source, str(tmp_path), world=source.world)
    assert_loaded(ranks.run(load_case, target, str(tmp_path), world=target.world), saved[0][0], merge_moments(saved))


def _save_in_pieces(case: Case, folder: str, piece_bytes: int) -> tuple[Any, Any]:
    limit, dcp.PIECE_BYTES = PIECE_BYTES, piece_bytes
    try:
        return train_and_save(case, folder)
    finally:
        dcp.PIECE_BYTES = limit


def test_large_tensors_are_written_in_pieces_and_read_as_wholes(ranks: RankPool, tmp_path: Path) -> None:
    limit = 128
    saved = ranks.run(_save_in_pieces, SOURCE, str(tmp_path), limit, world=SOURCE.world)
    tensors = SafeReader(tmp_path / "step-2").read_metadata().state_dict_metadata
    chunks = [(chunk, entry.properties.dtype.itemsize) for entry in tensors.values() for chunk in entry.chunks]  # type: ignore[union-attr]
    assert all(chunk.sizes.numel() * itemsize <= limit or chunk.sizes[0] == 1 for chunk, itemsize in chunks)
    assert len(chunks) > 2 * len(tensors)
    loaded = ranks.run(load_case, Case(2, 1, optimizer="adamw"), str(tmp_path), world=2)
    assert_loaded(loaded, saved[0][0], merge_moments(saved))


@pytest.mark.parametrize(
    "source", [TENSOR_SOURCES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in TENSOR_SOURCES[1:])], ids=str
)
def test_tensor_parallel_parts_become_wholes_and_back(ranks: RankPool, source: Case, tmp_path: Path) -> None:
    """Weights and moments stay exact, also where they are sharded further."""
    answers = ranks.run(train_and_save, source, str(tmp_path), world=source.world)
    weights, moments = answers[0][0], merge_moments(answers)
    for groups, fsdp, tp, stage in [(2, 1, 1, 0), (1, 1, 2, 0), (1, 2, 2, 3), (1, 2, 1, 2)]:
        placement = "cyclic" if groups > 1 else "full"
        target = Case(groups, fsdp, stage, optimizer="adamw", model=source.model, placement=placement, tp=tp)
        assert_loaded(ranks.run(load_case, target, str(tmp_path), world=target.world), weights, moments)
