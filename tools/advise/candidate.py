"""A way to train a model, with its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...engine.config.schema import Config
from ..plan.result import Forecast

Method = Literal["dense", "smaller dense", "forward", "backward", "forward, then backward"]


@dataclass(frozen=True)
class Candidate:
    """One way to train the model.

    Attributes:
        name: what users call it.
        method: what is trained, for which losses were measured.
        every: steps between two averages. 1 averages gradients in every step.
        groups: the number of SDP groups that the configuration has.
        capacity: the part of the full model that a group holds, or that a smaller model has.
        plans: the phases of the run, each with its part of the steps.
        layout: how a dense model is spread, if that is not said by the name or by the
            configuration.
    """

    name: str
    method: Method
    every: int
    groups: int
    capacity: float
    plans: tuple[tuple[float, Forecast], ...]
    layout: str = ""

    @property
    def is_sdp(self) -> bool:
        """Whether groups hold parts of the model."""
        return self.method not in ("dense", "smaller dense")

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs the most memory, in the phase that needs the most."""
        return max(plan.worst.trace.peak for _, plan in self.plans)

    @property
    def seconds(self) -> float:
        """Expected seconds of a step, as the mean over the run."""
        return sum(share * plan.seconds for share, plan in self.plans)

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.plans[0][1].batch.train

    @property
    def parameters(self) -> int:
        """Parameters of the model that is trained."""
        return self.plans[0][1].parameters


def mean_capacity(config: Config) -> float:
    """The part of the model that a group holds, as the mean over the groups."""
    capacity = config.sdp.capacity
    return sum(capacity) / len(capacity) if isinstance(capacity, list) else capacity


def with_sdp(config: Config, **sdp: object) -> Config:
    """Return ``config`` with these keys of ``sdp``, and without what local steps refuse."""
    keys = {"sync": None, **sdp}
    if keys["sync"] is not None:
        keys["lr_scale"] = "none"
    return config.model_copy(update={"sdp": config.sdp.model_copy(update=keys)})
