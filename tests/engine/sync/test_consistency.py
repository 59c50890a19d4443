"""Holders never drift, and if they did it would be found, on every rank, by the unit's name."""

import hashlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import HolderMismatchError
from sdp.engine.sync.between import checksum
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.ranks import RankPool


def _digests(engine: Any) -> dict[str, str]:
    """Hashes of this rank's shard of every parameter and of its optimizer state."""
    digests = {}
    for name, parameter in engine.parameters_here.items():
        state = engine.optimizer.state[parameter]
        tensors = [
            parameter.detach(),
            *(value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)),
        ]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(local_tensor(tensor).contiguous().cpu().numpy().tobytes())
        digests[name] = digest.hexdigest()
    return digests


def _digests_after(case: Case, steps: int) -> tuple[dict[str, str], dict[str, str]]:
    engine = engine_of(case)
    digests = []
    for step in range(steps):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
        if step in (0, steps - 1):
            digests.append(_digests(engine))
    engine.check_holders()
    return digests[0], digests[1]


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        # Weights that differ at all differ after a few steps.
        (Case(2, 2, 2, 1, optimizer="adamw", bf16=True, model="llama"), 8),
        (Case(2, 1, 0, 1, optimizer="adamw", model="even-llama", tp=2), 6),
        (Case(4, 1, 0, 1, optimizer="adamw", model="llama-of-3", neurons=3), 8),
    ],
    ids=str,
)  # fmt: skip
def test_holders_are_bitwise_equal_after_many_steps(ranks: RankPool, case: Case, steps: int) -> None:
    results = ranks.run(_digests_after, case, steps, world=case.world)
    mesh, compared = Mesh(case.groups, case.fsdp, case.tp), 0
    for moment in (0, 1):
        for rank, digests in enumerate(result[moment] for result in results):
            for other in range(rank):
                here, there = mesh.coordinates(rank), mesh.coordinates(other)
                if case.stage > 0 and here.fsdp != there.fsdp:
                    continue  # different shards
                common = set(digests) & set(results[other][moment])
                if here.tp != there.tp:  # different parts, but of the norms each has all
                    common = {name for name in common if "norm" in name}
                compared += len(common)
                for name in common:
                    assert digests[name] == results[other][moment][name], f"{name}: ranks {other} and {rank}"
    assert compared > 20
    assert all(
        first[name] != last[name]
        for first, last in results
        for name in first
        if name.endswith("weight") and "norm" not in name
    )


def _corrupt(case: Case, name: str, what: str, bad_rank: int, by_interval: bool) -> str | None:
    """The error here after one value of one rank was changed in its last place."""
    config = case.config()
    config["sdp"]["check_interval"] = 3 if by_interval else 0
    import sdp
    from sdp.tests.support import models

    engine = sdp.initialize(model=models.build(case.model), config=config)[0]
    for step in range(3):
        one_step(engine, case, step, data_rank=dist.get_rank())
        if step == 2 and by_interval:
            _flip(engine, name, what, bad_rank, by=1 << 18)  # the step's own rounding must not swallow it
            try:
                engine.step()
            except HolderMismatchError as error:
                return str(error)
            return None
        engine.step()
    engine.check_holders()
    _flip(engine, name, what, bad_rank)
    try:
        engine.check_holders()
    except HolderMismatchError as error:
        assert error.exit_code == 1
        return str(error)
    return None


def _flip(engine: Any, name: str, what: str, bad_rank: int, by: int = 1) -> None:
    if dist.get_rank() == bad_rank:
        parameter = engine.parameters_here[name]
        tensor = parameter.detach() if what == "weight" else engine.optimizer.state[parameter][what]
        words = local_tensor(tensor).view(-1).view(torch.int32)
        words[-1] += by


@pytest.mark.parametrize(
    ("what", "stage", "name", "bad_rank", "named"),
    [
        ("weight", 3, "layers.1.up.weight", 2, "unit 'layers.1'"),
        ("exp_avg", 0, "layers.0.down.bias", 1, "unit 'layers.0'"),  # held by one group: its replicas must agree
        ("exp_avg_sq", 3, "head.weight", 2, "the shared part"),
    ],
)
def test_one_flipped_bit_is_found(ranks: RankPool, what: str, stage: int, name: str, bad_rank: int, named: str) -> None:
    messages = ranks.run(_corrupt, Case(2, 2, stage, optimizer="adamw"), name, what, bad_rank, False, world=4)
    assert all(message is not None and message.startswith(named) for message in messages), messages
    assert len(set(messages)) == 1
    assert f"rank {bad_rank}" in messages[0]
    assert "\n" not in messages[0]


def test_check_interval_finds_it_in_training(ranks: RankPool) -> None:
    case = Case(4, 1, optimizer="adamw", placement="cyclic")
    messages = ranks.run(_corrupt, case, "layers.2.norm.bias", "exp_avg", 3, True, world=4)
    assert all(message is not None and "unit 'layers.2'" in message for message in messages), messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_checksum_sees_every_bit_and_position(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = torch.arange(1, 60).to(dtype)
        seen = {checksum([base])}
        raw = base.clone().view(torch.uint8)
        for position in range(0, raw.numel(), 3):
            for bit in (0, 7):
                raw[position] ^= 1 << bit
                seen.add(checksum([raw.view(dtype)]))
                raw[position] ^= 1 << bit
    assert len(seen) == 1 + 2 * len(range(0, raw.numel(), 3))
    assert checksum([base.flip(0)]) not in seen
    assert checksum([base[:30], base[30:]]) != checksum([base[30:], base[:30]])


def test_checksum_across_chunks() -> None:
    large = torch.zeros(3 * (1 << 20) + 5)
    sums = {checksum([large])}
    for position in (0, (1 << 20) - 1, 1 << 20, large.numel() - 1):
        large[position] = 1.0
        sums.add(checksum([large]))
        large[position] = 0.0
    assert len(sums) == 5


def _corrupt_a_copy() -> str:
    """The error after a norm changed on all holders' second tensor-parallel rank."""
    engine = engine_of(Case(2, 1, 0, model="even-llama", tp=2))
    name = next(name for name in engine.parameters_here if name == "model.norm.weight")
    if dist.get_rank() % 2 == 1:
        engine.parameters_here[name].data[0] += 1
    with pytest.raises(HolderMismatchError) as error:
        engine.check_holders()
    return str(error.value)


def test_copies_on_tensor_parallel_ranks_are_compared(ranks: RankPool) -> None:
    for message in ranks.run(_corrupt_a_copy, world=4):
        assert (
            "the shared part: weights or optimizer state of rank 1 (group 0) differ from those of rank 0 (group 0)"
            in message
        )
