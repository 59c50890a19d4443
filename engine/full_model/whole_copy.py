"""Copies the full model to every rank, and writes the files of an exported model.

The copy is an ordinary module, without shards and skipped blocks. So each rank may call the copy as
often as necessary, without the other ranks. Generation of text needs this.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..accounting.quantities import format_bytes
from ..batch.call import cast_floats
from ..errors import ConfigError, ModelError, OutOfMemoryError, shorten
from ..model_interface import get_config
from ..placement.layout import Layout
from ..placement.units import goes_into_sum
from ..subnetwork.branch_scale import BranchScale
from ..subnetwork.initialisation import ModuleInit

_MEMORY = Path("/proc/meminfo")
_SPARE = 0.9  # the fraction of the free memory that a copy may take, because activations need memory, too


class UncutModel:
    """The structure of the full model, before units were removed. Copies are made from it.

    Parameters and persistent buffers have no values.
    """

    def __init__(self, model: nn.Module, layout: Layout, plan: Sequence[ModuleInit] | None):
        """Copy the structure of ``model``. Call this before the model is cut.

        Args:
            model: The full model, with weights or on the meta device.
            layout: The layout of the run.
            plan: The initial values of a model on the meta device. It also computes buffers that no
                checkpoint has.
        """
        self._layout, self._plan = layout, plan or ()
        self._skeleton: nn.Module | None = None
        self._obstacle = ""
        known: dict[int, Any] = {
            id(weight): nn.Parameter(weight.detach().to("meta"), requires_grad=False) for weight in model.parameters()
        }
        saved = layout.buffers_at(0)
        known |= {id(buffer): buffer.to("meta") for name, buffer in model.named_buffers() if name in saved}
        try:
            self._skeleton = copy.deepcopy(model, known)
        except Exception as error:  # any class may refuse to be copied
            self._obstacle = shorten(f"{type(error).__name__}: {error}")

    def bytes_needed(self, dtype: torch.dtype) -> int:
        """Return the bytes of a copy whose floating-point parameters have ``dtype``."""
        layout = self._layout
        infos = [*(infos[0] for infos in layout.by_path.values()), *layout.buffers_at(0).values()]
        return sum(
            info.full_shape.numel() * (dtype if info.dtype.is_floating_point else info.dtype).itemsize for info in infos
        )

    def gather(
        self,
        tensors: Iterable[tuple[str, torch.Tensor | None]],
        dtype: torch.dtype,
        device: torch.device,
        path: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Broadcast rank 0's tensors of the full model, one at a time. Collective.

        Args:
            tensors: All tensors of the full model by canonical name. Rank 0 has the values.
            dtype: The type of floating-point parameters in the result.
            device: The device of the result.
            path: The path whose tensors are sent, if there are several (``sdp.paths``).

        Returns:
            The tensors by their name in the module.

        Raises:
            ModelError: The user's model cannot be copied.
            ConfigError: There is no such path, or there are several paths and none is given.
        """
        self.skeleton  # noqa: B018  raises
        layout, path = self._layout, 0 if path is None and self._layout.paths == 1 else path
        if path is None or path not in range(layout.paths):
            raise ConfigError(f"full_model: path {path!r} does not exist; give one from 0 to {layout.paths - 1}")
        infos = (layout.parameters_at(path) | layout.buffers_at(path)).values()  # group P trains path P
        paths = {info.canonical: info.path for info in infos}
        wanted = ((name, tensor) for name, tensor in tensors if name in paths)
        return {paths[name]: value for name, value in _on_every_rank(wanted, layout, dtype, device).items()}

    @property
    def skeleton(self) -> nn.Module:
        """The full model's modules, without values.

        Raises:
            ModelError: The user's model cannot be copied.
        """
        if self._skeleton is None:
            raise ModelError(
                f"full_model: this model cannot be copied ({self._obstacle}); load engine.full_state_dict() into "
                "another model"
            )
        return self._skeleton

    @contextmanager
    def filled(
        self, values: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device, layout: Layout
    ) -> Iterator[nn.Module]:
        """A context with a copy of the full model in evaluation mode.

        Args:
            values: The result of :meth:`gather`. The copy takes these tensors, and the mapping is
                emptied.
            dtype: The type of floating-point parameters and of floating-point inputs.
            device: The device of the copy.
            layout: The layout of the present phase, which says whether branches are scaled.
        """
        assert self._skeleton is not None
        values |= self._computed_buffers(self._skeleton, device)
        replaced: dict[int, Any] = {}
        for name, parameter in self._skeleton.named_parameters():
            replaced[id(parameter)] = nn.Parameter(values[name], requires_grad=False)
        for name, buffer in self._skeleton.named_buffers():
            replaced[id(buffer)] = values[name] if name in values else buffer.to(device, copy=True)
        model = copy.deepcopy(self._skeleton, replaced)
        values.clear()
        replaced.clear()
        scale = BranchScale(layout)
        with scale.of_full_model(), torch.no_grad():
            _scale(model, layout, scale)
        if dtype != torch.float32:
            cast = lambda _, args, kwargs: cast_floats((args, kwargs), dtype)  # noqa: E731
            model.register_forward_pre_hook(cast, with_kwargs=True)
        try:
            with scale.of_full_model():
                yield model.eval()
        finally:
            model.to("meta")  # free the memory, even if the caller keeps the model

    def _computed_buffers(self, skeleton: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the buffers that are not saved, of a model that was on the meta device."""
        saved = self._layout.buffers_at(0)
        buffers = dict(skeleton.named_buffers())
        missing = {name: buffer for name, buffer in buffers.items() if buffer.is_meta and name not in saved}
        found: dict[str, torch.Tensor] = {}
        for init in self._plan:
            if not any(name in missing for name in init.names):
                continue
            for name, fill in init.fillers().items():
                if name in missing:
                    found[name] = torch.empty_like(missing[name], device=device)
                    fill(found[name], 0)
        return found


def check_room(needed: int, free: Sequence[int | None], hosts: Sequence[str], device: torch.device) -> None:
    """Check that a copy of the full model fits in the memory of every rank.

    Args:
        needed: The bytes of a copy.
        free: The free bytes that each rank sees, or None where they are unknown.
        hosts: The host of each rank. If ``device`` is a CPU, the ranks of a host share its memory.
        device: The device of the copies.

    Raises:
        OutOfMemoryError: A copy does not fit. The message names the rank and the bytes.
    """
    for rank, (bytes_free, host) in enumerate(zip(free, hosts, strict=True)):
        copies = hosts.count(host) if device.type == "cpu" else 1
        if bytes_free is not None and needed * copies > _SPARE * bytes_free:
            ranks = f"{copies} ranks on {host}" if copies > 1 else f"rank {rank}"
            raise OutOfMemoryError(
                f"full_model: the full model takes {format_bytes(needed, 'GiB')}, and {ranks} would need "
                f"{format_bytes(needed * copies, 'GiB')}, but {format_bytes(bytes_free, 'GiB')} are free; use "
                "engine.evaluate(), or save the model with engine.save_pretrained() and load it in another process"
            )


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of ``device`` in bytes, or None if it is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _on_every_rank(
    tensors: Iterable[tuple[str, torch.Tensor | None]], layout: Layout, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Broadcast rank 0's tensors, one at a time. Parameters get ``dtype``."""
    found = {}
    for name, tensor in tensors:
        is_parameter = name in layout.wholes
        info = layout.wholes[name][0] if is_parameter else layout.buffers[name]
        kind = dtype if is_parameter and info.dtype.is_floating_point else info.dtype
        if tensor is None:
            value = torch.empty(info.full_shape, dtype=kind, device=device)
        else:
            value = tensor.detach().to(device, kind, copy=True).contiguous()
        if dist.is_initialized():
            dist.broadcast(value, src=0)
        found[name] = value
    return found


def _scale(model: nn.Module, layout: Layout, scale: BranchScale) -> None:
    """Apply ``sdp.branch_scale`` to the full model: to outputs of blocks, or weights of neurons."""
    if layout.branch_scale == "none" or layout.keeps_frozen:
        return
    if all(unit.is_block for unit in layout.units):
        scale.install(model)
        return
    for unit in layout.units:
        for part in unit.slices:
            if goes_into_sum(part.parameter, part.dim):
                part.of(model.get_parameter(part.parameter).data).mul_(scale.factor(unit))


def write_weights(state: Mapping[str, torch.Tensor], aliases: Mapping[str, str], path: Path) -> None:
    """Write the full model's weights ``state`` to the file ``path``.

    Args:
        state: The weights by name.
        aliases: The second and further names of tied tensors, each with the first name. Safetensors
            refuses tied tensors, and models tie them again when they load.
        path: The file. If the name ends in .bin, .pt or .pth, ``torch.load`` can read the file.
            Otherwise its format is safetensors.
    """
    tensors = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".bin", ".pt", ".pth"):
        torch.save(tensors | {alias: tensors[name] for alias, name in aliases.items()}, path)
    else:
        save_file(tensors, path, metadata={"format": "pt"})


def write_configuration(module: nn.Module, directory: Path, dtype: torch.dtype) -> None:
    """Write the configuration files of a Hugging Face model, such as ``config.json``.

    ``dtype`` is the type of the weights. For other models, nothing is written.
    """
    config = get_config(module)
    if not hasattr(config, "save_pretrained"):
        return
    # FSDP2 gives the module a class of its own, which inherits from FSDPModule and the model's
    # class.
    kind = type(module).__mro__[2] if isinstance(module, FSDPModule) else type(module)
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [kind.__name__], dtype
    config.save_pretrained(directory)
    if getattr(module, "generation_config", None) is not None:
        module.generation_config.save_pretrained(directory)  # type: ignore[union-attr, operator]
