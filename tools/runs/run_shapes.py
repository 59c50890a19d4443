"""The fields of a run's files that commands depend on, and their types.

A run may come from somebody else, or from another version. So only the keys that are read are
checked, and unknown keys are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...engine.errors import quote

_MOST = 1e18  # far above every figure of a run, and small enough for sums and products of figures

Number = Annotated[float, Field(ge=-_MOST, le=_MOST)] | None
Count = Annotated[int, Field(ge=0, lt=2**63)]
Numbers = dict[str, Annotated[float, Field(ge=-_MOST, le=_MOST)]] | None


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Line(_Shape):
    """A line of metrics.jsonl, evaluations.jsonl or restarts.jsonl."""

    step: Count
    tokens: Count = 0
    loss: Number = None
    accuracy: Number = None
    subnetwork_losses: list[Number] | None = None
    tokens_per_second: Number = None
    mfu: Number = None
    flops_per_second: Number = None
    step_seconds: Number = None
    comm_bytes: Number = None
    comm_bytes_by_kind: Numbers = None
    spikes_skipped: Count | None = None
    rollbacks: Count | None = None
    lost_steps: Count = 0
    round: Count = 0
    alive: Count = 0
    late: Count = 0
    skipped_tokens: Count = 0
    by_group: dict[str, Numbers] | None = None
    orphans: dict[str, Count] | None = None


class _Model(_Shape):
    name: str | None = None


class _NamedModel(_Shape):
    name: str
    parameters: Count


class _Groups(_Shape):
    groups: Count = 1
    lr_scale: Literal["none", "auto"] | Annotated[float, Field(ge=0, le=4)] = "none"


class _Optimizer(_Shape):
    type: str = ""


class _Data(_Shape):
    name: str | None = None


class _Training(_Shape):
    steps: Count | None = None


class RunConfig(_Shape):
    """config.json. Commands that need all of it load it as any other configuration."""

    model: _Model | None = None
    sdp: _Groups | None = None
    data: _Data | None = None
    optimizer: _Optimizer | None = None
    training: _Training | None = None


class SavedPlacement(_Shape):
    """placement.json."""

    groups: Annotated[int, Field(ge=1, le=2**20)]
    units: list[str]
    holders: list[list[Count]]
    costs: list[Count]
    flops: list[Count] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> SavedPlacement:
        lengths = {len(self.units), len(self.holders), len(self.costs), len(self.flops) or len(self.units)}
        if len(lengths) > 1:
            raise ValueError("units, holders, costs and flops have different lengths")
        if any(not held or max(held) >= self.groups for held in self.holders):
            raise ValueError("a unit has no holder, or a holder that is not a group")
        return self


class _Layout(_Shape):
    sdp: Count = 1
    fsdp: Count | None = None
    tp: Count = 1
    paths: Count = 1


class _HeldOut(_Shape):
    before: Number = None
    after: Number = None


class _Rank(_Shape):
    state_measured: dict[str, Count] = {}
    state_predicted: dict[str, Count] = {}
    peak_memory_bytes: Number = None
    baseline_memory_bytes: Number = None
    peak_tensor_bytes: Number = None
    comm_bytes_per_step: Numbers = None


class Summary(_Shape):
    """summary.json."""

    steps: Count = 0
    tokens: Count = 0
    tokens_per_second: Number = None
    model: _NamedModel | None = None
    layout: _Layout | None = None
    held_out: _HeldOut | None = None
    device: str = "cpu"
    dense_state_bytes: Numbers = None
    ddp_comm_bytes_per_step: Number = None
    ranks: list[_Rank] | None = None


def find_wrong_field(shape: type[BaseModel], data: Mapping[str, Any]) -> str | None:
    """Describe the first value in ``data`` that does not have the ``shape``, or return None."""
    try:
        shape.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{quote(where)}: {first['msg']}" if where else first["msg"]
    return None
