"""``sdp.zero``: contexts of DeepSpeed's ZeRO that need no special treatment here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum, StrEnum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..initialize import differs_between_groups
from .namespace import attributes, refusing

__path__: list[str] = []


class ZeroParamStatus(Enum):
    """Where the values of a parameter are that DeepSpeed's own engine shards.

    A member equals DeepSpeed's member of the same name.
    """

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "ZeroParamStatus" and getattr(other, "name", None) == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class ZeroStageEnum(IntEnum):
    """DeepSpeed's names of the stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """DeepSpeed's names of the places that state can be offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """DeepSpeed's names of the parts of the state."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def is_zero_param(parameter: Any) -> bool:
    """Whether DeepSpeed's own engine shards the parameter at stage 3."""
    return hasattr(parameter, "ds_id")


class Init:
    """A context in which a model is built, or its weights are loaded.

    Parameters keep their values and shapes, so that code inside may read and change them.
    :func:`sdp.initialize` shards them later. To build a model that does not fit into memory, use
    ``torch.device("meta")`` instead.
    """

    def __init__(self, *args: Any, enabled: bool = True, **kwargs: Any):
        """Takes DeepSpeed's arguments. They have no effect."""

    def __enter__(self) -> Init:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


class GatheredParameters:
    """A context in which parameters are whole.

    Before :func:`sdp.initialize` all parameters are whole already. With ``modifier_rank``, the
    values of this rank go to all ranks at the end of the context.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | nn.Module,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        """Choose the parameters.

        Args:
            params: One parameter, several, or those of a module.
            modifier_rank: The rank that changes them. None: no rank does.
            fwd_module: Has no effect.
            enabled: False makes this context a no-op.

        Raises:
            ConfigError: A parameter is sharded by an engine already, or ``modifier_rank`` is given
                for one that other groups may lack.
        """
        found: Sequence[Any]
        if isinstance(params, nn.Module):
            found = list(params.parameters())
        else:
            found = [params] if isinstance(params, torch.Tensor) else list(params)
        self._parameters = found if enabled else []
        self._modifier_rank = modifier_rank
        self._of_deepspeed: Any = None
        if any(isinstance(parameter, DTensor) for parameter in self._parameters):
            raise ConfigError(
                "sdp.zero.GatheredParameters: a parameter is sharded by sdp.initialize; change weights before it, "
                "and read them with engine.full_state_dict() or engine.full_model()"
            )
        if modifier_rank is not None and any(differs_between_groups(parameter) for parameter in self._parameters):
            raise ConfigError(
                "sdp.zero.GatheredParameters: modifier_rank is given after sdp.initialize, but groups hold different "
                "parameters; change weights before it, and read them with engine.full_state_dict()"
            )
        if any(hasattr(parameter, "ds_id") for parameter in self._parameters):
            from deepspeed import zero as of_deepspeed  # its engine shards them

            self._of_deepspeed = of_deepspeed.GatheredParameters(self._parameters, modifier_rank=modifier_rank)

    def __enter__(self) -> None:
        if self._of_deepspeed is not None:
            self._of_deepspeed.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._of_deepspeed is not None:
            self._of_deepspeed.__exit__(kind, value, trace)
        elif self._modifier_rank is not None and dist.is_initialized() and kind is None:
            for parameter in self._parameters:
                if not parameter.is_meta:
                    dist.broadcast(parameter.data, src=self._modifier_rank)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a module may use the parameters of other modules."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing."""


TiledLinear = refusing("zero.TiledLinear", "DeepSpeed's tiled layers are not supported")
MiCS_Init = refusing("zero.MiCS_Init", "MiCS is not supported; sdp.groups and fsdp arrange the ranks")

__getattr__ = attributes(__name__)
