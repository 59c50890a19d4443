"""Writes checkpoints, at once or in the background.

A checkpoint is written under a hidden name and then renamed. Weights that are NaN or infinite are
refused, because such a checkpoint could replace the last good one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..distributed.agreement import Ranks
from ..distributed.collectives import local_tensor
from ..errors import CheckpointError, NonFiniteError
from ..files import write_whole
from ..object_store import is_url
from .storage.dcp import METADATA, Chunks, MetadataWriter, PiecewisePlanner, _cause, _without_single_process_warning
from .storage.directory import DirectoryTarget
from .storage.files import encode_state
from .storage.remote import RemoteTarget, describe_newest


class Saver:
    """Writes checkpoints one after the other, at once or in the background.

    A save in the background copies the tensors to host memory, and a thread writes the copies.
    """

    def __init__(self, *, alone: bool, device: torch.device):
        self._alone, self._device = alone, device
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save(
        self,
        directory: str | Path,
        tag: str,
        tensors: dict[str, Any],
        state: Mapping[str, Any],
        *,
        parameters: Collection[str],
        background: bool,
        **options: Any,
    ) -> None:
        """Wait for the previous save, and write a checkpoint with :func:`write`. Collective.

        Args:
            directory, tag, tensors, state, options: Arguments of :func:`write`.
            parameters: The canonical names of the model's parameters, which must be finite.
            background: Whether to return once the tensors are copied. :meth:`wait` then raises the
                error of the save.

        Raises:
            NonFiniteError: One of the ``parameters`` is NaN or infinite. Nothing is written then.
            CheckpointError: ``state`` is not JSON, or the checkpoint cannot be written.
        """
        self.wait()
        encode_state(state)  # report a state that is not JSON now, not in the thread
        check_finite(directory, tensors, parameters, Ranks(self._alone))
        save = partial(write, directory, tag, state=state, **options)
        if not background:
            save(tensors=tensors, ranks=Ranks(self._alone))
            return
        if self._thread is None:
            # A new thread uses the first CUDA device, whichever device its creator uses.
            use = (lambda: torch.cuda.set_device(self._device)) if self._device.type == "cuda" else None
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=use)
            # Its collectives must not mix with those of the training loop.
            self._group = None if self._alone else dist.new_group(backend="gloo")  # type: ignore[assignment]
        ranks = Ranks(self._alone, self._group)
        self._pending = self._thread.submit(save, tensors=_copied(tensors), ranks=ranks)

    def wait(self, *, block: bool = True) -> bool:
        """Wait until the save in the background has ended, and raise its error if it failed.

        If ``block`` is False and the save still runs, return False at once.
        """
        pending = self._pending
        if pending is not None and (block or pending.done()):
            self._pending = None
            pending.result()
        return self._pending is None


def _copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the tensors in host memory."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )  # fmt: skip
    copies = DefaultStager(options).stage(
        {key: value.locals if isinstance(value, Chunks) else value for key, value in tensors.items()}
    )
    assert isinstance(copies, dict)
    parts = {
        key: Chunks(copies[key], value.offsets, value.shape)
        for key, value in tensors.items()
        if isinstance(value, Chunks)
    }
    return {**copies, **parts}


def write(
    directory: str | Path,
    tag: str,
    tensors: dict[str, Any],
    state: Mapping[str, Any],
    ranks: Ranks,
    *,
    keep: int | None = None,
    keep_every: int = 0,
    files: Mapping[str, bytes] = MappingProxyType({}),
    is_newest: bool = True,
) -> None:
    """Write the checkpoint ``directory/tag``. Collective.

    Args:
        directory: The directory of the checkpoints, or its URL in an object store.
        tag: The name of the checkpoint.
        tensors: What this rank saves, by key.
        state: The content of ``state.json``, without the hashes of the files.
        ranks: The processes that save together.
        keep: How many checkpoints to keep, including the new one. If None, all stay.
        keep_every: Also keep checkpoints of steps that are multiples of this, unless it is 0.
        files: Further files to write, as content by name. Only those of rank 0 are written.
        is_newest: Whether a load without a tag finds this checkpoint.

    Raises:
        CheckpointError: On every rank, if ``state`` is not JSON, if ranks have different tags or
            the checkpoint cannot be written. A half-written checkpoint is removed.
    """
    tags = ranks.gather(tag)
    if len(set(tags)) > 1:
        other = next(rank for rank, tag in enumerate(tags) if tag != tags[0])
        raise CheckpointError(
            f"save_checkpoint: rank 0 has the tag {tags[0]!r}, but rank {other} has {tags[other]!r}; give all ranks "
            "the same tag"
        )

    def together(action: Callable[[], Any], *, on_rank_0: bool = False) -> Any:
        """Run ``action`` on all ranks or only on rank 0. If it fails, all ranks raise the error."""

        def act() -> Any:
            try:
                return action() if ranks.rank == 0 or not on_rank_0 else None
            except OSError as error:
                raise CheckpointError(f"cannot write the checkpoint: {error}") from None

        return ranks.all_or_none(act)

    target: RemoteTarget | DirectoryTarget = together(
        lambda: RemoteTarget(str(directory), tag) if is_url(directory) else DirectoryTarget(Path(directory), tag)
    )

    def finish(digests: dict[str, str]) -> None:
        for name, content in files.items():
            write_whole(target.aside / name, content)
        digests |= target.add([target.aside / METADATA, *(target.aside / name for name in files)])
        target.publish(encode_state({**state, "files": digests}), is_newest=is_newest)
        if keep is not None:
            target.prune(keep, keep_every)

    try:
        together(target.make_room, on_rank_0=True)
        together(lambda: target.enter(ranks.rank))
        write_tensors(target.aside, tensors, ranks)
        everyones = ranks.gather(together(lambda: target.add(target.aside.glob(f"__{ranks.rank}_*.distcp"))))
        hashes = {name: digest for found in everyones for name, digest in found.items()}
        together(lambda: finish(hashes), on_rank_0=True)
    except CheckpointError:
        target.clean(ranks.rank)
        raise
    target.clean(ranks.rank)


def write_tensors(aside: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Write the ``tensors`` of all ranks to the directory ``aside``. Collective."""
    try:
        with _without_single_process_warning():
            dcp.save(
                tensors,
                storage_writer=MetadataWriter(aside),
                planner=PiecewisePlanner(),
                no_dist=ranks.alone,
                process_group=ranks.group,
            )
    except CheckpointException as error:  # the same on every rank
        raise CheckpointError(f"cannot write the checkpoint: {_cause(error)}") from None


def check_finite(directory: str | Path, tensors: Mapping[str, Any], parameters: Collection[str], ranks: Ranks) -> None:
    """Check that all weights that a save would write are finite. Collective.

    A finite gradient can still make a weight infinite. Buffers are not checked, because a mask may
    hold infinite values. The check costs one reduction per tensor and one wait for the device.

    Args:
        directory: The directory of the checkpoints. The error names the newest one in it.
        tensors: What this rank saves, by key.
        parameters: The canonical names of the model's parameters.
        ranks: The processes that save together.

    Raises:
        NonFiniteError: On every rank, if a weight is NaN or infinite. The message names this
            parameter and the newest checkpoint.
    """
    found = next((name for name in ranks.gather(_first_damaged(tensors, parameters)) if name is not None), None)
    if found is None:
        return
    newest = ranks.gather(describe_newest(directory) if ranks.rank == 0 else None)[0]
    raise NonFiniteError(
        f"the weight {found} has values that are NaN or infinite, so no checkpoint is written; "
        f"the newest good checkpoint: {newest}; resume from it with a lower learning rate"
    )


def _first_damaged(tensors: Mapping[str, Any], parameters: Collection[str]) -> str | None:
    names, peaks = [], []
    for name in parameters:
        value = tensors.get(f"model/{name}")
        if value is None:
            continue
        for part in value.locals if isinstance(value, Chunks) else [local_tensor(value)]:
            if part.numel() and (part.is_floating_point() or part.is_complex()):
                names.append(name)
                # A NaN stays a NaN in a maximum, so one reduction finds both.
                peaks.append(torch.linalg.vector_norm(part.detach(), ord=float("inf")).double())
    if not peaks:
        return None
    finite = torch.isfinite(torch.stack(peaks)).tolist()
    return next((name for name, good in zip(names, finite, strict=True) if not good), None)
