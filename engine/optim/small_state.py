"""Adam whose moments take fewer bytes (``optimizer.params.state_dtype``).

- "bfloat16": the first moment is bfloat16. The second moment stays float32, because with a decay
  rate of 0.999 it could not fall in bfloat16.
- "int8": both moments of a tensor with two or more dimensions are codes of 8 bits, with a float32
  scale for each block of a row. The 256 levels of a code are those of dynamic quantisation
  (Dettmers et al., arXiv 2110.02861), as in torchao and bitsandbytes. Those libraries cut blocks
  from the flat shard of a rank, so a checkpoint fits only one sharding. This module cuts blocks
  from rows, so they fit every sharding of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.collectives import local_tensor
from .optimizer_state import call_closure

BLOCK = 256  # numbers of a row with the same scale
SCALES = ":s"  # the state KEY has codes, and KEY:s has their scales
_AT_ONCE = 2**22  # how many elements are float32 at the same time in a step


class Codes:
    """Converts moments into codes of 8 bits and back.

    The 256 levels of a code are 0, 1, and the middles of equal intervals of each decade. The
    largest decade, (0.1, 1), has the most intervals. Each of the six lower decades has half as many
    intervals as the decade above it.

    Args:
        key: "exp_avg", whose levels have both signs, or "exp_avg_sq", whose levels are positive.
        device: The device of the numbers.
    """

    def __init__(self, key: str, device: torch.device):
        is_signed = key == "exp_avg"
        levels = [0.0, 1.0]
        for decade in range(7):
            intervals = 2**decade * (1 if is_signed else 2)
            for index in range(intervals):
                level = 10.0 ** (decade - 6) * (0.1 + 0.9 * (index + 0.5) / intervals)
                levels += [level, -level] if is_signed else [level]
        self._levels = torch.tensor(sorted(levels), device=device)
        self._middles = (self._levels[1:] + self._levels[:-1]) / 2

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest codes of float32 values (rows, …), and their scales (rows, blocks)."""
        rows, row = values.shape[0], values.shape[1:].numel()
        blocks = -(-row // BLOCK)
        padded = torch.nn.functional.pad(values.reshape(rows, row), (0, blocks * BLOCK - row))
        padded = padded.view(rows, blocks, BLOCK)
        scales = padded.abs().amax(2)
        ratios = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]).view(rows, blocks * BLOCK)[
            :, :row
        ]
        codes = torch.bucketize(ratios.contiguous(), self._middles, out_int32=True)
        return codes.to(torch.uint8).view(values.shape), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the float32 values of codes (rows, …) with scales (rows, blocks)."""
        values = self._levels[codes.int()]
        flat = values.view(len(codes), codes.shape[1:].numel())
        for block, columns in enumerate(flat.split(BLOCK, 1)):
            columns.mul_(scales[:, block, None])
        return values


class SmallStateAdam(Optimizer):
    """Adam with the formulas of ``torch.optim.AdamW`` and moments in fewer bytes.

    A step computes in float32. It converts only some rows at a time, to save memory.

    Args:
        parameters: Parameters or parameter groups, as plain tensors or DTensors.
        state_dtype: The type in which moments are stored.
        lr: The learning rate.
        betas: The decay rates of the moments.
        eps: The term in the denominator.
        weight_decay: The weight decay.
        decoupled: Whether weight decay is decoupled, as in AdamW.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        state_dtype: Literal["bfloat16", "int8"],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ):
        self._state_dtype, self._decoupled = state_dtype, decoupled
        self._codes: dict[tuple[str, torch.device], Codes] = {}
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def state_bytes(self, numel: int, row: torch.Size | None) -> int:
        """Return the bytes of both moments for ``numel`` elements of a parameter.

        Args:
            numel: The number of elements.
            row: The shape of a row. None for a tensor with fewer than two dimensions.
        """
        if self._state_dtype == "bfloat16":
            return 6 * numel
        if row is None:
            return 8 * numel
        return 2 * (numel + 4 * (numel // max(1, row.numel())) * -(-row.numel() // BLOCK))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        If a ``closure`` is given, it is called before the update, and its result is returned.
        """
        loss = call_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    self._create(state, parameter)
                state["step"] += 1
                if local_tensor(parameter).numel():  # a rank's shard of a few rows may be empty
                    self._update(group, parameter, state, state["step"].item())
        return loss

    def _create(self, state: dict[str, Any], parameter: Tensor) -> None:
        for key in ("exp_avg", "exp_avg_sq"):
            if self._state_dtype == "bfloat16":
                dtype = torch.bfloat16 if key == "exp_avg" else torch.float32
                state[key] = torch.zeros_like(parameter, dtype=dtype)
            elif parameter.ndim < 2:
                state[key] = torch.zeros_like(parameter, dtype=torch.float32)
            else:
                state[key] = torch.zeros_like(parameter, dtype=torch.uint8)
                rows, blocks = len(local_tensor(parameter)), -(-parameter.shape[1:].numel() // BLOCK)
                state[key + SCALES] = torch.zeros(rows, blocks, device=local_tensor(parameter).device)

    def _update(self, group: Mapping[str, Any], parameter: Tensor, state: Mapping[str, Tensor], steps: float) -> None:
        rate, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        tensors = {key: local_tensor(value) for key, value in state.items() if key != "step"}
        tensors |= {"weight": local_tensor(parameter.detach()), "grad": local_tensor(parameter.grad)}  # type: ignore[arg-type]
        rows = max(1, _AT_ONCE // max(1, parameter.shape[1:].numel()))
        if parameter.ndim == 0:
            tensors = {key: value.view(1) for key, value in tensors.items()}
        for part in zip(*(value.split(rows) for value in tensors.values()), strict=True):
            at = dict(zip(tensors, part, strict=True))
            weight, gradient = at["weight"], at["grad"].float()
            if decay and not self._decoupled:
                gradient = gradient.add(weight, alpha=decay)
            first = self._read(at, "exp_avg").lerp_(gradient, 1 - beta1)
            second = self._read(at, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            self._write(at, "exp_avg", first)
            self._write(at, "exp_avg_sq", second)
            if decay and self._decoupled:
                weight.mul_(1 - rate * decay)
            denominator = second.div_(1 - beta2**steps).sqrt_().add_(group["eps"])
            weight.addcdiv_(first, denominator, value=-rate / (1 - beta1**steps))

    def _read(self, at: Mapping[str, Tensor], key: str) -> Tensor:
        if key + SCALES in at:
            return self._codes_of(key, at[key]).decode(at[key], at[key + SCALES])
        return at[key].to(torch.float32, copy=True)

    def _write(self, at: Mapping[str, Tensor], key: str, value: Tensor) -> None:
        if key + SCALES not in at:
            at[key].copy_(value)
            return
        codes, scales = self._codes_of(key, value).encode(value)
        at[key].copy_(codes)
        at[key + SCALES].copy_(scales)

    def _codes_of(self, key: str, tensor: Tensor) -> Codes:
        if (key, tensor.device) not in self._codes:
            self._codes[key, tensor.device] = Codes(key, tensor.device)
        return self._codes[key, tensor.device]
