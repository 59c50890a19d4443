"""``sdp.masking``: schedules, and one clear line for what cannot be one."""

from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError

FORWARD = {"until": 0.75, "masking": "forward"}
BACKWARD = {"masking": "backward"}


def _load(masking: Any, steps: int | None = 100, **section: Any) -> Any:
    training = {} if steps is None else {"steps": steps}
    return load_config({"sdp": {"groups": 2, "masking": masking, **section}, "training": training})


@pytest.mark.parametrize(
    ("masking", "steps", "of_steps"),
    [
        ("backward", None, "bbbb"),
        ([{"masking": "backward"}], None, "bbbb"),
        ([{"until": 2, "masking": "forward"}, BACKWARD], None, "ffbb"),
        ([{"until": 2.0, "masking": "forward"}, BACKWARD], 4, "ffbb"),
        ([FORWARD, BACKWARD], 4, "fffb"),
        ([{"until": 0.3, "masking": "backward"}, {"until": 3, "masking": "forward"}, BACKWARD], 4, "bffb"),
    ],
)
def test_every_step_has_a_masking(masking: Any, steps: int | None, of_steps: str) -> None:
    config = _load(masking, steps)
    schedule = config.masking_schedule
    assert "".join(schedule.at(step)[0] for step in range(1, 5)) == of_steps
    changes = [step for step in range(2, 5) if of_steps[step - 2] != of_steps[step - 1]]
    assert [*schedule.starts] == [1, *changes]
    assert {masking[0] for masking in config.sdp.maskings} == set(of_steps)
    assert load_config(config.resolved()).masking_schedule == schedule


def test_a_single_phase_is_the_plain_value() -> None:
    assert _load([{"masking": "backward"}]) == _load("backward")


@pytest.mark.parametrize(
    ("masking", "steps", "message"),
    [
        ("sideways", 100, "sdp.masking: input should be 'forward' or 'backward' or input should be a valid list"),
        ([], 100, "sdp.masking: input should be 'forward' or 'backward' or list should have at least 1 item"),
        ([FORWARD, {"masking": "sideways"}], 100, "sdp.masking.1.masking: input should be 'forward' or 'backward'"),
        ([FORWARD, {"masking": "forward"}], 100, 'sdp.masking.1: masking "forward" is that of the phase before it'),
        ([FORWARD, {"until": 0.9, "masking": "backward"}], 100, "sdp.masking.1.until: 0.9 ends the last phase"),
        ([{"until": 5, "masking": "forward"}], 100, "sdp.masking.0.until: 5 ends the last phase"),
        ([{"until": 1.0, "masking": "forward"}, BACKWARD], 100, "sdp.masking.0.until: 1.0 means the whole run"),
        ([{"masking": "forward"}, BACKWARD], 100, "sdp.masking.0.until: this key is required, because another phase"),
        ([FORWARD, BACKWARD], None, "sdp.masking.0.until: 0.75 is a fraction of training.steps, which is not set"),
        ([FORWARD, {"until": 0.5, "masking": "backward"}, {"masking": "forward"}], 100,
            "sdp.masking.1.until: 0.5 (step 50) leaves a phase without a step; phases are in the order of"),
        ([FORWARD, {"until": 75, "masking": "backward"}, {"masking": "forward"}], 100,
            "sdp.masking.1.until: step 75 leaves a phase without a step; phases are in the order of"),
        ([{"until": 100, "masking": "forward"}, BACKWARD], 100, "sdp.masking.0.until: step 100 leaves"),
        ([{"until": 0.001, "masking": "forward"}, BACKWARD], 100,
            "sdp.masking.0.until: 0.001 (step 0) leaves a phase without a step; phases are in the order of"),
        ([{"until": 1.5, "masking": "forward"}, BACKWARD], 100, "sdp.masking.0.until: input should be a valid integer"),
        ([{"until": 0, "masking": "forward"}, BACKWARD], 100, "sdp.masking.0.until: input should be greater than 0"),
        ([{"util": 5, "masking": "forward"}, BACKWARD], 100, "sdp.masking.0.util: unknown key, did you mean until?"),
        (["forward", "backward"], 100, "sdp.masking.0: input should be a valid dictionary"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_schedule_is_one_line(masking: Any, steps: int | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        _load(masking, steps)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("masking", "steps"),
    [
        ([{"until": 1e300, "masking": "forward"}, BACKWARD], 100),
        ([{"until": 10**305, "masking": "forward"}, BACKWARD], 10**304),
        ([{"until": 10**300, "masking": "forward"}], 100),
        (
            [{"until": 10**300, "masking": "forward"}, {"until": 9, "masking": "backward"}, {"masking": "forward"}],
            10**305,
        ),
    ],
    ids=["float", "steps", "last phase", "order"],
)
def test_a_message_repeats_the_first_digits_of_a_number(masking: Any, steps: int) -> None:
    with pytest.raises(ConfigError, match=r"^sdp\.masking\.\d\.until: ") as error:
        _load(masking, steps)
    assert len(str(error.value)) < 300


def test_a_schedule_cannot_be_combined_with_local_steps() -> None:
    message = r"^sdp\.masking: a schedule is not available in this version together with sdp\.sync"
    with pytest.raises(ConfigError, match=message):
        _load([FORWARD, BACKWARD], sync={"every": 4})


def test_scales_of_branches_need_a_forward_phase() -> None:
    assert _load([FORWARD, BACKWARD], branch_scale="train").sdp.branch_scale == "train"
    with pytest.raises(ConfigError, match=r'sdp\.branch_scale: "train" has no meaning with sdp\.masking "backward"'):
        _load([BACKWARD], branch_scale="train")
