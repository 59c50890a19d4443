"""A spike is more than sigma standard deviations above the mean of the window, as in OLMo."""

import json
import math
import random
import statistics

import pytest
from sdp.engine.errors import SpikeError
from sdp.engine.optim.clip import SpikeDetector


def nothing() -> None:
    pass


def fed(window: int, steps: int, sigma: float = 6.0, policy: str = "skip") -> SpikeDetector:
    detector = SpikeDetector(policy, sigma, window)  # type: ignore[arg-type]
    noise = random.Random(0)
    for step in range(steps):
        assert not detector.check(step + 1, noise.gauss(4, 0.1), noise.gauss(1, 0.02), nothing)
    return detector


def test_the_bound_is_that_of_the_formula() -> None:
    values = [random.Random(1).gauss(4, 0.1) for _ in range(128)]
    bound = statistics.fmean(values) + 6 * statistics.stdev(values)
    for factor, expected in ((1 - 1e-9, False), (1 + 1e-9, True)):
        detector = SpikeDetector("skip", 6, 128)
        for step, value in enumerate(values):
            detector.check(step + 1, value, 1.0, nothing)
        assert detector.check(129, bound * factor, 1.0, nothing) is expected


@pytest.mark.parametrize(
    ("loss", "norm", "named"), [(9.0, 1.0, "the loss 9 is"), (4.0, 5.0, "the gradient's norm 5 is")]
)
def test_loss_and_norm_are_judged(loss: float, norm: float, named: str) -> None:
    assert named in (fed(128, 128).judge(loss, norm) or "")


@pytest.mark.parametrize(("window", "needed"), [(128, 64), (30, 20), (8, 8)])
def test_the_first_steps_are_not_judged(window: int, needed: int) -> None:
    assert fed(window, needed - 1).judge(100.0, 1.0) is None
    assert fed(window, needed).judge(100.0, 1.0) is not None


def test_a_level_that_stays_high_becomes_normal() -> None:
    detector = fed(20, 20)
    outcomes = [detector.check(step, 9.0, 1.0, nothing) for step in range(20)]
    assert outcomes[0] and not outcomes[-1]


def test_nan_and_inf_are_left_to_others() -> None:
    detector = fed(20, 20)
    before = detector.state_dict()
    assert not any(detector.check(1, *values, nothing) for values in ((math.nan, 1.0), (4.0, math.inf)))
    assert detector.state_dict() == before


def test_the_state_continues_exactly() -> None:
    whole, other = fed(20, 30), SpikeDetector("skip", 6, 20)
    other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for loss in (4.0, 9.0, 4.1, 5.5):
        assert whole.check(1, loss, 1.0, nothing) == other.check(1, loss, 1.0, nothing)
    assert whole.skipped == other.skipped > 0


@pytest.mark.parametrize("policy", ["rollback", "stop"])
def test_other_policies_raise_before_the_update(policy: str) -> None:
    dropped: list[bool] = []
    with pytest.raises(SpikeError, match=rf"step 21: the loss 9 is more than 6 .* \(training\.on_spike {policy}\)"):
        fed(20, 20, policy=policy).check(21, 9.0, 1.0, lambda: dropped.append(True))
    assert dropped


def test_without_a_policy_nothing_is_kept() -> None:
    assert fed(20, 20, policy="none").state_dict() == {}
