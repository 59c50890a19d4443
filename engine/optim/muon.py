"""The optimizer Muon for the matrices of the blocks, and AdamW for all other parameters.

Muon (Jordan et al.; Liu et al., arXiv 2502.16982) makes the momentum of a matrix orthogonal, which
needs the whole matrix. Once per step, the ranks gather the momentum of each sharded matrix, in the
type ``ns_dtype``. Each rank computes the step of the whole matrix, and applies it to its shard. The
formulas are those of ``torch.optim.Muon``, which takes whole matrices only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..config.named_params import MuonParams
from ..config.section import parse_section
from ..distributed.collectives import TensorRanks, Traffic, all_gather_single, local_tensor
from ..errors import ConfigError
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from .optimizer_state import call_closure

# The iteration's coefficients and its guard against a division by 0 (as in torch.optim.Muon).
_COEFFICIENTS, _EPS = (3.4445, -4.7750, 2.0315), 1e-7


@dataclass(frozen=True)
class Matrix:
    """How tensor parallelism cuts a matrix.

    Attributes:
        cut: The dimension that is cut. None if each tensor-parallel rank has the whole matrix.
        ranks: The tensor-parallel ranks. None without tensor parallelism.
    """

    cut: int | None = None
    ranks: TensorRanks | None = None


class Muon(Optimizer):
    """Muon for matrices and AdamW for all other parameters, in one optimizer.

    Call :meth:`arrange` to say which parameters are matrices. Without this call, all parameters
    with two dimensions are matrices.

    Args:
        parameters: Parameters or parameter groups, as plain tensors or DTensors.
        lr: The learning rate of matrices.
        momentum: The decay rate of the momentum of matrices.
        nesterov: Whether the step looks ahead along the momentum.
        ns_steps: The number of Newton-Schulz iterations that make a matrix orthogonal.
        ns_dtype: The type in which these iterations compute.
        adjust_lr_fn: "match_rms_adamw" makes steps as long as AdamW's, so that matrices and
            other parameters can have one rate. "original" is the rule of Muon's author.
        weight_decay: The decoupled weight decay of all parameters.
        adam_lr: The learning rate of all other parameters, by default ``lr``. A schedule scales
            ``lr`` and ``adam_lr``.
        betas: AdamW's decay rates.
        eps: AdamW's term in the denominator.
        state_dtype: The dtype of the momentum and of AdamW's first moment. The second moment is
            always float32, because its changes are below the precision of bfloat16.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        weight_decay: float = 0.0,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        state_dtype: torch.dtype = torch.float32,
    ):
        self.ns_dtype, self.state_dtype = ns_dtype, state_dtype
        self._nesterov, self._ns_steps, self._adjust = nesterov, ns_steps, adjust_lr_fn
        self._adam_ratio = 1.0 if adam_lr is None or lr == 0 else adam_lr / lr
        self._matrices: dict[int, Matrix] | None = None  # by the id of the parameter
        self._traffic = Traffic()
        self.gathers = 0  # number of gathers since the start
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )

    def arrange(self, matrices: Mapping[nn.Parameter, Matrix], traffic: Traffic) -> None:
        """Set which parameters are matrices, and how tensor parallelism cuts them.

        The bytes of gathers are counted in ``traffic``.
        """
        self._matrices = {id(parameter): matrix for parameter, matrix in matrices.items()}
        self._traffic = traffic

    def state_bytes(self, numel: int, *, is_matrix: bool) -> int:
        """Return the bytes of state of ``numel`` elements: Muon's for a matrix, else AdamW's."""
        size = self.state_dtype.itemsize
        return numel * (size if is_matrix else size + 4)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. All ranks of a group must call it together.

        If a ``closure`` is given, it is called before the update, and its result is returned.
        """
        loss = call_closure(closure)
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            matrices = [(p, matrix) for p in with_gradient if (matrix := self._matrix(p)) is not None]
            self._step_matrices(group, matrices)
            self._step_others(group, [p for p in with_gradient if self._matrix(p) is None])
        return loss

    def _matrix(self, parameter: nn.Parameter) -> Matrix | None:
        if self._matrices is None:
            return Matrix() if parameter.ndim == 2 else None
        return self._matrices.get(id(parameter))

    # -- matrices ----------------------------------------------------------------------------------

    def _step_matrices(self, group: dict[str, Any], matrices: Sequence[tuple[nn.Parameter, Matrix]]) -> None:
        for parameter, matrix, whole in self._gathered(group, matrices):
            weight = local_tensor(parameter.detach())
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            update = self._orthogonal(whole).to(weight.dtype).mul_(group["lr"] * self._rate_factor(whole.shape))
            weight.sub_(_own_shard(update, parameter, matrix))

    def _gathered(
        self, group: dict[str, Any], matrices: Sequence[tuple[nn.Parameter, Matrix]]
    ) -> Iterator[tuple[nn.Parameter, Matrix, Tensor]]:
        """Yield the momentum of each whole matrix, while the next one is gathered."""
        ahead: tuple[nn.Parameter, Matrix, Callable[[], Tensor]] | None = None
        for parameter, matrix in matrices:
            launched = (parameter, matrix, self._gather_rows(parameter, self._update_momentum(group, parameter)))
            if ahead is not None:
                yield ahead[0], ahead[1], _join_columns(ahead[1], ahead[2]())
            ahead = launched
        if ahead is not None:
            yield ahead[0], ahead[1], _join_columns(ahead[1], ahead[2]())

    def _update_momentum(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """Update the momentum. Return this rank's shard of the matrix to make orthogonal."""
        state, factor = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        assert parameter.grad is not None
        gradient, kept = local_tensor(parameter.grad), local_tensor(state["momentum_buffer"])
        momentum = kept.to(gradient.dtype).lerp(gradient, 1 - factor)
        kept.copy_(momentum)
        return (gradient.lerp(momentum, factor) if self._nesterov else momentum).to(self.ns_dtype)

    def _gather_rows(self, parameter: nn.Parameter, shard: Tensor) -> Callable[[], Tensor]:
        """Start to gather the rows of a sharded matrix.

        Returns a function that waits for the rows, and returns them in a new tensor.
        """
        if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
            return shard.clone
        communicator, ranks = parameter.device_mesh.get_group(), parameter.device_mesh.size()
        rows, columns = parameter.shape
        padded = shard.new_zeros((-(-rows // ranks), columns))
        padded[: len(shard)] = shard
        whole = shard.new_empty((ranks * len(padded), columns))
        self._traffic.record("inside groups", "all_gather", whole.nbytes, get_process_group_ranks(communicator))
        self.gathers += 1
        work = all_gather_single(whole, padded, group=communicator, async_op=True)

        def finish() -> Tensor:
            if work is not None:
                work.wait()
            return whole[:rows]

        return finish

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """Return nearly U Vᵀ for ``matrix`` = U S Vᵀ, by Newton-Schulz iterations."""
        a, b, c = _COEFFICIENTS
        is_tall = matrix.shape[0] > matrix.shape[1]
        result = matrix.T if is_tall else matrix
        result = result / result.norm().clamp(min=_EPS)
        for _ in range(self._ns_steps):
            gram = result @ result.T
            result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
        return result.T if is_tall else result

    def _rate_factor(self, shape: torch.Size) -> float:
        rows, columns = shape
        if self._adjust == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    # -- other parameters: AdamW -------------------------------------------------------------------

    def _step_others(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        rate, (beta1, beta2) = group["lr"] * self._adam_ratio, group["betas"]
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["step"] += 1
            steps = state["step"].item()
            assert parameter.grad is not None
            weight, gradient = local_tensor(parameter.detach()), local_tensor(parameter.grad)
            kept, squares = local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
            average = kept.to(gradient.dtype).lerp(gradient, 1 - beta1)
            kept.copy_(average)
            squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            denominator = (squares / (1 - beta2**steps)).sqrt_().add_(group["eps"])
            weight.mul_(1 - rate * group["weight_decay"])
            weight.addcdiv_(average, denominator, value=-rate / (1 - beta1**steps))


def _join_columns(matrix: Matrix, rows: Tensor) -> Tensor:
    """Gather the parts of tensor-parallel ranks, if the matrix is cut among them."""
    return rows if matrix.cut is None or matrix.ranks is None else matrix.ranks.all_gather(rows, matrix.cut)


def _own_shard(whole: Tensor, parameter: nn.Parameter, matrix: Matrix) -> Tensor:
    """Return the part of ``whole`` that this rank holds."""
    if matrix.cut is not None and matrix.ranks is not None:
        whole = whole.chunk(matrix.ranks.size, dim=matrix.cut)[matrix.ranks.index]
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return whole
    size = -(-len(whole) // parameter.device_mesh.size())
    start = min(len(whole), parameter.device_mesh.get_local_rank() * size)
    return whole[start : start + size]


def build_muon(
    name: str, params: Mapping[str, Any], parameters: list[Any], device: torch.device
) -> tuple[Optimizer, str]:
    """Return Muon, built from ``optimizer.params``, and a line for the log. Raises ConfigError."""
    settings = parse_section(MuonParams, params, "optimizer.params")
    if settings.adam_lr and not settings.lr:
        raise ConfigError(
            "optimizer.params.lr: 0, but adam_lr is above 0, and the schedule multiplies both by one factor; set lr "
            "above 0 too"
        )
    chosen = settings.model_dump(exclude={"betas", "ns_dtype", "state_dtype"})
    optimizer = Muon(
        parameters,
        **chosen,
        betas=(settings.betas[0], settings.betas[1]),
        ns_dtype=getattr(torch, settings.ns_dtype),
        state_dtype=getattr(torch, settings.state_dtype),
    )
    return optimizer, f"{name}: SDP's own, for sharded matrices, with torch.optim.Muon's formulas; AdamW for the rest"


def is_matrix(info: TensorInfo, layout: Layout) -> bool:
    """Return whether Muon, not AdamW, steps on a tensor: a matrix in a block, or a slice of one.

    Embeddings and heads are outside the blocks. The choice does not depend on the placement.
    """
    return len(info.full_shape) == 2 and any(info.path.startswith(f"{block}.") for block in layout.blocks)


def arrange(
    optimizer: Optimizer,
    layout: Layout,
    parameters: Mapping[str, nn.Parameter],
    tensor_ranks: TensorRanks | None,
    traffic: Traffic,
) -> None:
    """If ``optimizer`` is a :class:`Muon`, set which parameters are matrices.

    ``parameters`` has this rank's parameters by their names in ``layout``. ``tensor_ranks`` are the
    tensor-parallel ranks, which cut matrices. The bytes of gathers are counted in ``traffic``.
    """
    if not isinstance(optimizer, Muon):
        return
    matrices = {
        parameter: Matrix(info.tp_dim, tensor_ranks)
        for name, parameter in parameters.items()
        if is_matrix(info := layout.parameters[name], layout)
    }
    optimizer.arrange(matrices, traffic)
