"""Cases that the tests of checkpoints train, save and load."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.checkpoint.storage.files import encode_state, hash_files
from sdp.engine.errors import CheckpointError
from sdp.tests.support import models
from sdp.tests.support.case_tables import SCHEDULED_STEPS
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, whole
from sdp.tests.support.ranks import rank_alone
from torch import nn

SOURCE = Case(2, 2, stage=3, optimizer="adamw", placement="mixed")
ALONE = Case(1, optimizer="adamw", placement="full")  # of a process without others
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
    return {name: tensor for answer in answers for name, tensor in answer[1].items()}


def assert_loaded(answers: list[tuple[Any, ...]], weights: Any, moments: dict[str, torch.Tensor]) -> None:
    """Compare what ranks loaded with what was saved, bit for bit."""
    for found, saved in ((answers[0][0], weights), (merge_moments(answers), moments)):
        assert set(found) == set(saved)
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def save_one_step(folder: Path) -> dict[str, torch.Tensor]:
    """Train ALONE for one step, save it, and return the weights."""
    with rank_alone():
        engine = engine_of(ALONE)
        one_step(engine, ALONE, 0, data_rank=0)
        engine.step()
        engine.save_checkpoint(folder)
        return {name: value.clone() for name, value in engine.full_state_dict().items()}


def load_alone(folder: Path, tag: str | None = None) -> Any:
    with rank_alone():
        return engine_of(ALONE).load_checkpoint(folder, tag)


def refusal_of_load(folder: Path, tag: str | None = None) -> str:
    """Return the one-line message with which the load is refused."""
    with pytest.raises(CheckpointError) as error:
        load_alone(folder, tag)
    assert "\n" not in str(error.value)
    return str(error.value)


def reseal(path: Path, **changes: Any) -> None:
    """Make the hashes right again, as the author of a forged checkpoint would."""
    state = json.loads((path / "state.json").read_text())
    files = hash_files(file for file in path.iterdir() if file.name != "state.json")
    state = {**state, "files": {**state["files"], **files}, **changes}
    state.pop("sha256")
    (path / "state.json").write_text(encode_state(state))


class Dropped(nn.Module):
    """A block with dropout, and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.linear = nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(self.norm(x)))


class DroppedModel(nn.Module):
    """Five such blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropped() for _ in range(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x[:, :3] - y).square().mean()


def make_engine(case: Case, name: str) -> Any:
    """Make the engine of a case. The model "dropped" has dropout and running statistics."""
    if case.model != "dropped":
        return engine_of(case, name)
    torch.manual_seed(0)
    placement = {f"layers.{index}": holders for index, holders in enumerate([[0], [0, 1], [1], [0, 1], [1]])}
    config = replace(case, model="mlp").config(name)
    return sdp.initialize(model=DroppedModel(), config=config | {"sdp": config["sdp"] | {"placement": placement}})[0]


def _evaluated(engine: Any, case: Case) -> float:
    return engine.evaluate([models.micro_batch(case.model.replace("dropped", "mlp"), 90, 0, data_rank_of(case))])


def _trained(engine: Any, case: Case, steps: range) -> list[float]:
    losses, data = [], replace(case, model=case.model.replace("dropped", "mlp"))
    for step in steps:
        losses.append(one_step(engine, data, step, data_rank=data_rank_of(case)))
        engine.step()
        if case.model == "dropped":  # it gives ranks the same running statistics, as a load does
            _evaluated(engine, case)
    return losses


def losses_of(engine: Any, case: Case, steps: range) -> list[float]:
    """Losses of some steps, and of an evaluation after the last. Steps are numbered from 0."""
    return [*_trained(engine, case, steps), _evaluated(engine, case)]


def resumed(case: Case, folder: str, name: str = "fsdp2", every: int = 1) -> tuple[list[Any], list[Any]]:
    """What an undisturbed run gives, and what engines give that start from its checkpoints.

    It saves after each ``every`` steps. If that is 1: with a schedule in both phases and at the
    switch, with local steps amid a round and at its end.
    """
    engine, expected, found = make_engine(case, name), [], []
    losses: list[float] = []
    steps = SCHEDULED_STEPS if case.sync or case.masking.startswith("[") else 3
    starts = range(every, steps, every)
    for step in range(steps):
        if step in starts:
            engine.save_checkpoint(folder, tag=f"before-{step + 1}")
        losses += (_trained if step + 1 < steps else losses_of)(engine, case, range(step, step + 1))
    end = engine.full_state_dict()
    for start in starts:
        other = make_engine(case, name)
        if start % 2 or len(starts) == 1:  # it has other weights, and was in the last phase or averaged a round
            _trained(other, case, range(1, steps if steps == SCHEDULED_STEPS else 2))
        other.load_checkpoint(folder, tag=f"before-{start + 1}")
        expected.append((losses[start:], end))
        found.append((losses_of(other, case, range(start, steps)), other.full_state_dict()))
    return expected, found


def assert_equal_runs(answers: list[tuple[list[Any], list[Any]]]) -> None:
    for expected, found in answers:
        for (losses, weights), (others, other_weights) in zip(expected, found, strict=True):
            assert others == losses
            assert (weights is None) == (other_weights is None)
            for name, weight in (weights or {}).items():
                assert torch.equal(other_weights[name], weight), name
