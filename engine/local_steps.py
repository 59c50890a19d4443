"""What the engine and checkpoints need of a backend whose groups take steps of their own
(``sdp.sync``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from .config.sync import SyncSection
from .sync.outer import OuterFacts


class LocalUpdate(NamedTuple):
    """The outcome of a local step of all groups.

    Attributes:
        loss: the mean loss of all ranks.
        norm: the mean of the groups' gradient norms before clipping, without those of groups that
            skipped.
        skipped: the number of groups that skipped the step, because their gradient is NaN or
            infinite.
    """

    loss: float
    norm: float
    skipped: int


class PendingUpdate:
    """The outcome of a local step. The other groups' part of it may still be under way.

    Args:
        receive: waits for the other groups and returns the outcome. It is called once.
    """

    def __init__(self, receive: Callable[[], LocalUpdate]):
        self._receive = receive
        self._received: LocalUpdate | None = None

    def wait(self) -> LocalUpdate:
        """Return the outcome. Waits until every group has sent its part."""
        if self._received is None:
            self._received = self._receive()
        return self._received


class Spot(NamedTuple):
    """Where a tensor of local steps is in the full model.

    Attributes:
        name: the parameter or slice to which its elements belong.
        offset: the index of its first element in the full model's parameter.
    """

    name: str
    offset: tuple[int, ...]


class FlatState(NamedTuple):
    """Where the optimizer's state of a weight is, if one flat tensor has that of many weights.

    Attributes:
        start: the index of the weight's first element in the flat tensor.
        param_group: the optimizer's parameter group of the flat tensor.
    """

    start: int
    param_group: dict[str, Any]


class GroupPart(NamedTuple):
    """This process's part of what one group has by itself between averages.

    Attributes:
        group: the group.
        position: the coordinates of the rank in the keys of what ranks do not share.
        weights: the group's weights by name.
        parameters: the tensors to which the optimizer's state belongs, by the names of weights.
        optimizer: the inner optimizer, with the state of this group.
        errors: what compression has not sent yet, by name.
        before: the weights at the start of the average that is under way, by name.
        buffers: the running statistics of the rank, by name.
        flat: where the state of a weight is in its tensor of ``parameters``, if that tensor is
            flat.
        materialise: creates the optimizer's state of all ``parameters``. None: as torch does it.
    """

    group: int
    position: str
    weights: Mapping[str, torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    optimizer: Optimizer
    errors: Mapping[str, torch.Tensor]
    before: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    flat: Mapping[str, FlatState] = {}
    materialise: Callable[[], None] | None = None


class CommonPart(NamedTuple):
    """This process's part of what all holders of a unit have in common between averages.

    Attributes:
        anchors: the anchors of trained parameters by name.
        optimizer: the outer optimizer, which steps on the anchors.
        buffers: the averaged running statistics by name.
        means: the changes that have been averaged and are not applied yet, by name.
    """

    anchors: Mapping[str, torch.Tensor]
    optimizer: Optimizer
    buffers: Mapping[str, torch.Tensor]
    means: Mapping[str, torch.Tensor]


class LocalSteps(Protocol):
    """Steps that groups take on their own, and the averages between them (``sdp.sync``)."""

    @property
    def sync(self) -> SyncSection:
        """The settings."""
        ...

    def step(self, loss: torch.Tensor, scheduler: Any, count: float | None = None) -> PendingUpdate:
        """Let every group clip and take a step of its own, and start to tell the other groups.

        ``loss`` is this process's mean loss, or with a ``count`` the sum of ``count`` losses.
        Collective.
        """
        ...

    @property
    def travelling(self) -> int | None:
        """The fragment whose average was started and is not applied yet."""
        ...

    def common_state(self) -> tuple[Mapping[str, torch.Tensor], Optimizer]:
        """The weights and the optimizer that are equal at all holders: anchors, and the outer
        optimizer.
        """
        ...

    def start(self, fragment: int) -> None:
        """Start to average the weights of ``fragment`` among their holders. Collective."""
        ...

    def arrive(self) -> OuterFacts:
        """Apply the average that was started. Collective."""
        ...

    def groups_here(self) -> Iterator[GroupPart]:
        """The groups of this process.

        The optimizer has the state of a group only until the next one.
        """
        ...

    def untrained(self) -> Mapping[str, torch.Tensor]:
        """This process's parts of the parameters that are not trained, by name."""
        ...

    def common_part(self) -> CommonPart:
        """The state that all holders have in common. Waits for averages that are under way."""
        ...

    def nbytes(self) -> int:
        """The bytes of anchors, outer optimizer state and errors of this process."""
        ...

    def restart(self, travelling: int | None) -> None:
        """Prepare to load a state in which the average of the fragment ``travelling`` is under
        way.
        """
        ...

    def reset(self) -> None:
        """Make the backend's parameters the anchors and the weights of all groups.

        Outer state stays.
        """
        ...

    def anchored(self) -> AbstractContextManager[None]:
        """A context in which the module has the weights and buffers of the anchors. Collective."""
        ...
