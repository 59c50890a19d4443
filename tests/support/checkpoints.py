"""Cases that the tests of checkpoints train, save and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.checkpoint.files import encode_state, hash_files
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, whole

SOURCE = Case(2, 2, stage=3, optimizer="adamw", placement="mixed")
TENSOR_SOURCES = [
    Case(2, 1, stage=3, optimizer="adamw", model="even-llama-tied", tp=2),
    Case(1, 2, stage=3, optimizer="adamw", model="even-llama", placement="full", tp=2),
    Case(2, 1, optimizer="adamw", model="even-llama-tied-meta"),
]


def moments_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer state of this rank's parameters as full tensors."""
    return {
        f"{name}/{key}": (whole(engine, name, value) if value.shape == parameter.shape else value).clone()
        for name, parameter in engine.parameters_here.items()
        for key, value in sorted(engine.optimizer.state[parameter].items())
        if isinstance(value, torch.Tensor)
    }


def train_and_save(case: Case, folder: str) -> tuple[Any, Any]:
    """Train two steps on this rank, save, and return the full weights and this rank's moments."""
    engine = engine_of(case)
    for step in range(2):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
    engine.save_checkpoint(folder, client_state={"note": "kept"})
    return engine.full_state_dict(), moments_of(engine)


def load_case(case: Case, folder: str) -> tuple[Any, Any, Any, Any]:
    """Load the checkpoint of step 2; return weights, moments, client state and learning rates."""
    engine = engine_of(case)
    path, client = engine.load_checkpoint(folder)
    assert path == f"{folder}/step-2"
    assert engine.global_steps == 2
    return engine.full_state_dict(), moments_of(engine), client, engine.get_lr()


def merge_moments(answers: list[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    """Merge the moments that the ranks returned, by name."""
    return {name: tensor for answer in answers for name, tensor in answer[1].items()}


def save_one_step(folder: Path) -> dict[str, torch.Tensor]:
    """Train SOURCE for one step with the reference, save it, and return the weights."""
    engine = engine_of(SOURCE, "reference")
    one_step(engine, SOURCE, 0, data_rank=None)
    engine.step()
    engine.save_checkpoint(folder)
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


def load_by_reference(folder: Path, tag: str | None = None) -> Any:
    """Load a checkpoint of SOURCE into the reference engine."""
    return engine_of(SOURCE, "reference").load_checkpoint(folder, tag)


def refusal_of_load(folder: Path, tag: str | None = None) -> str:
    """Return the one-line message with which the load is refused."""
    with pytest.raises(CheckpointError) as error:
        load_by_reference(folder, tag)
    assert "\n" not in str(error.value)
    return str(error.value)


def reseal(path: Path, **changes: Any) -> None:
    """Make the hashes right again, as the author of a forged checkpoint would."""
    state = json.loads((path / "state.json").read_text())
    files = hash_files(file for file in path.iterdir() if file.name != "state.json")
    state = {**state, "files": {**state["files"], **files}, **changes}
    state.pop("sha256")
    (path / "state.json").write_text(encode_state(state))
