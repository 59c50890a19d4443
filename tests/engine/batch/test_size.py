"""DeepSpeed's batch arithmetic; errors print every factor and where it came from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdp.engine.batch.size import BatchSize
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resolve(mesh: Mesh, *values: int | None) -> BatchSize:
    return BatchSize.resolve(
        load_config({key: value for key, value in zip(KEYS, values, strict=True) if value is not None}), mesh
    )


@given(
    micro=st.integers(1, 9),
    accumulation=st.integers(1, 9),
    groups=st.integers(1, 5),
    fsdp=st.integers(1, 5),
    hidden=st.sets(st.integers(0, 2)),
)
def test_what_is_left_out_is_completed(micro: int, accumulation: int, groups: int, fsdp: int, hidden: set[int]) -> None:
    mesh = Mesh(groups, fsdp)
    train = micro * accumulation * groups * fsdp
    given_values = [None if index in hidden else value for index, value in enumerate((train, micro, accumulation))]
    found = resolve(mesh, *given_values)
    assert found.train == found.micro * found.accumulation * groups * fsdp
    for value, result in zip(given_values, (found.train, found.micro, found.accumulation), strict=True):
        assert value is None or value == result
    if len(hidden) <= 1:
        assert found == BatchSize(train, micro, accumulation)


def test_tensor_ranks_read_the_same_data() -> None:
    assert resolve(Mesh(2, 3, 4), None, 5, 2).train == 60


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ((17, 2, 2), ["train_batch_size 17 (from the configuration)", "gpu 2 (from the configuration)",
            "steps 2 (from the configuration)", "= 24"]),
        ((16, 3, None), ["train_batch_size 16 (from the configuration)", "gpu 3 (from the configuration)",
            "steps 0 (derived)"]),
        ((20, None, 3), ["train_batch_size 20 (from the configuration)", "gpu 1 (derived)",
            "steps 3 (from the configuration)", "= 18"]),
        ((4, None, None), ["train_batch_size 4 (from the configuration)", "gpu 0 (derived)"]),
    ],
)  # fmt: skip
def test_every_factor_is_printed(values: tuple[int | None, ...], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Mesh(2, 3), *values)
    text = str(caught.value)
    assert "\n" not in text
    for part in [*parts, "data ranks 6 (sdp.groups 2 × fsdp 3)", "change one of them"]:
        assert part in text
