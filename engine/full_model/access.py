"""The methods of an engine that use the full model, of which each rank has only a part."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from ..batch.call import cast_floats, checked_weights, count_targets
from ..config.schema import Config
from ..distributed.agreement import Ranks, gather_json, start_max
from ..distributed.collectives import outside_inference_mode
from ..distributed.mesh import machine_id
from ..errors import ConfigError, DataError, ModelError, quote, shorten
from ..subnetwork.carve import Evaluation, warn_of_partial_pass, with_skeletons
from ..sync.between import BetweenGroups
from .evaluation import (
    Statistics,
    StreamedEvaluation,
    batch_statistics,
    in_eval_mode,
    mean_loss,
    routed_loss,
    split_by_path,
    subnetwork_losses,
    tracks_statistics,
    with_statistics,
)
from .gather import agree_on_buffers, stream_full_state
from .whole_copy import UncutModel, check_room, free_bytes, write_configuration, write_weights


class FullModel:
    """Evaluates, copies and saves the full model. An engine offers the same methods.

    Every rank has an object of this class. With local steps, the full model has the weights after
    the last average (the anchors).

    Args:
        groups: the model and the communication of this rank.
        config: the configuration.
        uncut: the structure of the model before units were removed. None if every rank has the full
            model.

    Attributes:
        evaluation: records whether the engine evaluates now. Other passes in evaluation mode cause
            a warning.
    """

    def __init__(self, groups: BetweenGroups, config: Config, uncut: UncutModel | None = None):
        self._groups, self._store = groups, groups.store
        self.evaluation = Evaluation()
        self._uncut = uncut
        if "forward" in config.sdp.maskings or not config.sdp.copies.are_exact:
            warn_of_partial_state(self._store.module, lambda: self.is_partial)
            warn_of_partial_pass(self._store.module, self.evaluation, lambda: self.is_partial)

    @property
    def is_partial(self) -> bool:
        """Whether a group's module is not the full model: it lacks units, or has inexact copies."""
        layout = self._store.layout
        partial = any(len(holders) < layout.mesh.sdp for holders in layout.placement.holders)
        return partial and not (layout.keeps_frozen and layout.copies.are_exact) and layout.paths == 1

    def _anchored(self) -> Any:
        return nullcontext() if self._groups.local is None else self._groups.local.anchored()

    def evaluate(
        self, batches: Sequence[Any], weights: Iterable[float] | None, paths: Iterable[Any] | None = None
    ) -> float:
        """Return the full model's weighted mean loss over the batches of all ranks. Collective.

        :meth:`~sdp.engine.engine.SDPEngine.evaluate` explains the arguments.
        """
        module, count = self._store.module, self._store.layout.paths
        ids = [0] * len(batches)
        if paths is not None:
            batches, ids = split_by_path(batches, paths, count, weighted=weights is not None)
        elif count > 1:
            raise ConfigError(
                f"evaluate: the model has {count} paths; give paths=, with the path of each batch or of each row"
            )
        counts = [int(count_targets(module, b)) for b in batches] if weights is None else checked_weights(weights)
        if len(counts) != len(batches):
            raise ConfigError(f"evaluate: {len(counts)} weights for {len(batches)} batches; give one for each batch")
        with self._anchored(), self._running():
            loss = self._loss(batches, counts, ids)
        if math.isnan(loss) and not start_max([int(any(counts))])()[0]:
            raise DataError(
                "evaluate: no batch of any rank has a label that counts; give batches with labels, or give the "
                "weight of each batch as weights="
            )
        return loss

    def _loss(self, batches: Sequence[Any], counts: Sequence[float], paths: Sequence[int] = ()) -> float:
        self._groups.finish_refresh()
        agree_on_buffers(self._store)
        layout = self._store.layout
        with self._store.evaluating(full_model=True) as before_turn:
            if layout.paths > 1:
                return routed_loss(self._store, batches, counts, paths)
            if (layout.keeps_frozen and layout.copies.are_exact) or layout.mesh.sdp == 1:
                return mean_loss(self._store, batches, counts)
            return StreamedEvaluation(self._store, before_turn).run(batches, counts)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with in_eval_mode(self._store.module), self.evaluation.running():
            yield

    def evaluate_subnetworks(self, batches: Iterable[Any]) -> list[float]:
        """Return each group's mean loss per token, of its subnetwork on its batches. Collective."""
        local = self._groups.local
        self._groups.finish_refresh()
        if local is None:
            agree_on_buffers(self._store)
        statistics = local.group_statistics() if local is not None else nullcontext()
        with self._running(), self._store.evaluating(full_model=False), statistics:
            return subnetwork_losses(self._store, list(batches))

    @contextmanager
    def recalibrated(self, batches: Iterable[Any]) -> Iterator[None]:
        """A context in which batch norms have running statistics of the full model. Collective.

        Use this to evaluate, save or export the full model. While a rank trains, it tracks
        statistics of its subnetwork. The context measures statistics of the full model, in a pass
        over ``batches`` of training data. All ranks need the same number of batches. At the end of
        the context, each rank has its earlier statistics again. Nothing happens if the model has no
        batch norm, or has paths.
        """
        if self._store.layout.paths > 1 or not tracks_statistics(self._store.layout.buffers):
            yield
            return
        with self._anchored():
            with self._running():
                statistics = self._statistics(list(batches))
            with with_statistics(dict(self._store.module.named_buffers()), statistics):
                yield

    def _statistics(self, batches: Sequence[Any]) -> Statistics:
        """Return the full model's batch-norm statistics over all ranks' batches, by buffer."""
        module, context = self._store.module, self._store.context
        run: Callable[[], object] = lambda: self._loss(batches, [1] * len(batches))  # noqa: E731
        return batch_statistics(list(with_skeletons(module)), run, context.all_reduce_control, context.device)

    @contextmanager
    def full_model(self, dtype: torch.dtype | None = None, path: int | None = None) -> Iterator[nn.Module]:
        """A context with a copy of the full model in evaluation mode, on every rank. Collective.

        The copy is an ordinary module with the present weights. Each rank may call the copy at any
        time, for example to generate text. The end of the context frees the memory.

        Args:
            dtype: The type of the parameters. Default: the precision of the computation.
            path: Which path to copy, if there are several (``sdp.paths``).

        Raises:
            OutOfMemoryError: The copy does not fit on every rank.
            ModelError: The model cannot be copied.
        """
        context, layout, uncut = self._store.context, self._store.layout, self._uncut
        if uncut is None:
            with in_eval_mode(self._store.module):
                yield self._store.module
            return
        dtype = context.compute_dtype if dtype is None else dtype
        needed, free = uncut.bytes_needed(dtype), free_bytes(context.device)
        facts = gather_json([free, machine_id()])
        check_room(needed, [fact[0] for fact in facts], [fact[1] for fact in facts], context.device)
        with outside_inference_mode(), self._anchored():
            values = uncut.gather(self._stream(), dtype, context.device, path)
        with uncut.filled(values, dtype, context.device, layout) as model:
            yield model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the full model's ``generate``. Collective. Arguments may differ between ranks.

        If groups run only a part of the model, each call first copies the full model to every rank.
        For several calls, it is faster to use :meth:`full_model` once.

        Raises:
            OutOfMemoryError: The full model does not fit on every rank.
        """
        if not self.is_partial:
            return self._store.module.generate(*args, **kwargs)  # type: ignore[operator]
        with self.full_model() as model:
            return model.generate(*args, **kwargs)  # type: ignore[operator]

    def _stream(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        self._groups.reshard()
        agree_on_buffers(self._store)
        return stream_full_state(self._store)

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the full model's weights and persistent buffers, on rank 0's CPU. Collective.

        Other ranks get None. Keys are the names in the model before it was cut, with the prefix
        ``paths.P.`` if only path P has the tensor (``sdp.paths``). A tied parameter has an entry
        for each of its names. Parameters are sent one at a time.
        """
        with outside_inference_mode(), self._anchored():
            streamed = ((name, tensor) for name, tensor in self._stream() if tensor is not None)
            state = {name: tensor.detach().cpu().clone() for name, tensor in streamed}
        if self._store.context.rank != 0:
            return None
        return state | {alias: state[name] for alias, name in self._store.layout.aliases.items()}

    def consolidated_16bit_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return :meth:`full_state_dict` in compute precision. Collective. Only rank 0 gets it."""
        state, kind = self.full_state_dict(), self._store.context.compute_dtype
        if state is None or kind == torch.float32:
            return state
        return cast_floats(state, kind)

    def save_pretrained(self, save_directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write the full model's weights to ``save_directory/model.safetensors``. Collective.

        A Hugging Face model's configuration is written too, so ``from_pretrained`` can load the
        folder. If the model has PEFT adapters, only these are written, as PEFT itself does.

        Args:
            save_directory: The directory.
            dtype: The type of floating-point weights. Default: float32.

        Raises:
            ModelError: The model has several paths.
            ConfigError: ``dtype`` is no type of torch.
            CheckpointError: The directory cannot be written.
        """
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(f"save_pretrained: dtype {quote(dtype)} is not a dtype of torch, such as torch.bfloat16")
        if self._store.layout.paths > 1:
            raise ModelError(
                "engine.save_pretrained: the model has several paths, and a folder has one model; save each path "
                "with engine.full_model(path=…)"
            )
        self._write(Path(save_directory), "model.safetensors", dtype)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the full model in the precision of the computation, as in DeepSpeed. Collective.

        Args:
            save_dir: The directory.
            save_filename: The name of the file. With .bin, .pt or .pth at the end, ``torch.load``
                can read the file. Otherwise its format is safetensors.
            exclude_frozen_parameters: Must be False.
        """
        if exclude_frozen_parameters:
            raise ConfigError("save_16bit_model: exclude_frozen_parameters must be False: the file has all weights")
        self._write(Path(save_dir), save_filename, self._store.context.compute_dtype)
        return True

    def _write(self, directory: Path, name: str, dtype: torch.dtype | None) -> None:
        """Write the full model's weights to ``directory/name``, and its configuration. Collective.

        ``dtype`` is the type of the weights. If it is None, they stay float32.
        """
        module: Any = self._store.module
        has_adapters = any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)
        if has_adapters and self._uncut is not None:  # PEFT would leave out adapters that this rank does not have
            module = self._uncut.skeleton
        state, problem = self.full_state_dict(), None
        if state is not None:
            state = state if dtype is None else cast_floats(state, dtype)
            try:
                if has_adapters:
                    module.save_pretrained(directory, state_dict=state)
                else:
                    write_weights(state, self._store.layout.aliases, directory / name)
                    write_configuration(module, directory, dtype or torch.float32)
            except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
                problem = f"{directory}: the model cannot be written ({shorten(error)}); choose another directory"
        # Ranks also wait here, so that none reads the files before they are complete.
        Ranks(alone=dist.get_world_size() == 1).agree(problem)


log = logging.getLogger("sdp")


def warn_of_partial_state(module: nn.Module, is_partial: Callable[[], bool]) -> None:
    """Make ``module.state_dict()`` warn once if ``is_partial()`` says that units are missing."""

    warned = False

    def warn(*_: Any) -> None:
        nonlocal warned
        if not warned and is_partial():
            warned = True
            log.warning(
                "module.state_dict() has only the subnetwork of this rank's group; engine.full_state_dict() and "
                "engine.save_pretrained(DIR) give the whole model"
            )

    module.register_state_dict_pre_hook(warn)
