"""Saves and loads the state of an engine.

The modules that read and write files are imported by the first save or load, because many scripts
never save.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed.agreement import Ranks
from ..distributed.collectives import outside_inference_mode
from ..errors import ConfigError
from ..optim.param_groups import named_rates, set_rates

if TYPE_CHECKING:
    from .save import Saver
    from .state import SavedState

log = logging.getLogger("sdp")


class Checkpoints:
    """Saves and loads the state of a run. An engine offers the same methods.

    Args:
        engine: the engine (:class:`~sdp.engine.engine.SDPEngine`).
    """

    def __init__(self, engine: Any):
        self._engine = engine

    @cached_property
    def _state(self) -> SavedState:
        from .state import SavedState

        return SavedState(self._engine.groups)

    @cached_property
    def _saver(self) -> Saver:
        from .save import Saver

        return Saver(alone=self._engine.world_size == 1, device=self._engine.device)

    @outside_inference_mode()
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
        keep_every: int = 0,
        background: bool = False,
    ) -> bool:
        """Write weights, optimizer, schedule and data position to ``save_dir/tag``. Collective.

        Only one holder writes a unit. So the weights and optimizer state of all holders are
        compared first. In a directory, an earlier checkpoint with this tag stays until the new one
        is complete. In an object store, it is removed first.

        Args:
            save_dir: The directory of all checkpoints, or a URL such as ``s3://bucket/run``.
            tag: The name of this checkpoint. Default: ``step-N``.
            client_state: Values of the script to save: JSON values and plain tensors.
            save_latest: Whether a load without a tag finds this checkpoint.
            exclude_frozen_parameters: Only causes a warning, because a checkpoint has all weights.
            keep: How many of the checkpoints named ``step-N`` to keep. If None, all stay.
            keep_every: Also keep checkpoints of steps that are multiples of this, unless it is 0.
            background: Whether to return as soon as the state is copied to host memory. The copy is
                written while training continues. If the save fails, :meth:`wait_for_checkpoint`
                raises the error.

        Raises:
            CheckpointError: Nothing could be written, or ``client_state`` has values of other
                kinds.
            HolderMismatchError: Holders of a unit have different weights or optimizer state.
            NonFiniteError: A weight is NaN or infinite.
        """
        from .client_state import ClientState
        from .settings import run_state
        from .storage.directory import check_tag

        engine = self._engine
        if exclude_frozen_parameters and engine.global_rank == 0:
            log.warning("save_checkpoint: exclude_frozen_parameters has no effect; a checkpoint has all weights")
        tag = check_tag(tag) if tag is not None else f"step-{engine.global_steps}"
        client = ClientState(client_state)
        engine.check_holders()
        state = run_state(engine, self._state, engine.rates_of_parameters(), client.values)
        tensors = self._state.tensors() | self._state.random_state()
        self._saver.save(
            save_dir, tag, tensors, state, parameters=engine.layout.wholes, keep=keep, keep_every=keep_every,
            background=background, files=client.files(), is_newest=save_latest,
        )  # fmt: skip
        return True

    def wait_for_checkpoint(self, *, block: bool = True) -> None:
        """Wait until the save in the background has ended, and raise its error if it failed.

        If ``block`` is False and the save still runs, return at once.
        """
        if "_saver" in vars(self):
            self._saver.wait(block=block)

    @outside_inference_mode()
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        configured_rates: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from a checkpoint of any layout (ranks, groups and placement). Collective.

        Rank 0 logs all settings that differ from those of the checkpoint.

        Args:
            load_dir: The directory of all checkpoints, or its URL.
            tag: The name of the checkpoint. Default: the newest checkpoint.
            load_module_strict: Has no effect. A checkpoint must have all weights.
            load_optimizer_states: Whether to load optimizer state, random numbers and loss scale.
            load_lr_scheduler_states: Whether to load the state of the learning-rate schedule.
            load_module_only: Whether to load only weights and buffers.
            custom_load_fn: Not supported. A value other than None raises ConfigError.
            configured_rates: Whether the learning rates of the configuration apply. By default
                those of the checkpoint apply, as in DeepSpeed.

        Returns:
            The checkpoint's path and the client state. If no ``tag`` is given and there is no
            checkpoint, the result is ``(None, {})``, and a warning is logged.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another model, optimizer or
                data set, or ``load_dir`` is itself a checkpoint.
        """
        from .client_state import read_client_state
        from .load import find_together
        from .resume import check_weights, resume
        from .settings import describe_changes, log_changes, settings_to_save

        if custom_load_fn is not None:
            raise ConfigError("load_checkpoint: custom_load_fn is not supported; leave it out")
        engine, saved_state = self._engine, self._state
        if not load_module_strict and engine.global_rank == 0:
            log.warning("load_checkpoint: load_module_strict has no effect; a checkpoint must have all weights")
        ranks = Ranks(alone=engine.world_size == 1)
        found = find_together(load_dir, tag, ranks)
        if found is None:
            if engine.global_rank == 0:
                log.warning("no checkpoint in %s; starting from the beginning", load_dir)
            return None, {}
        path, state = found
        client, groups = read_client_state(path, state, ranks), engine.groups
        if load_module_only:
            resume(path, state, groups, saved_state, None, None, None, ranks=ranks, with_optimizer=False)
            engine.forget_micro_batches()
            return str(path), client
        names, optimizer = groups.names_of_param_groups(), engine.store.optimizer
        configured = named_rates(optimizer, names)
        state = state if load_lr_scheduler_states else {**state, "scheduler": None}
        if engine.config.sdp.sync is not None:  # this drops the state of the present round
            state = check_weights(path, state, saved_state, ranks)
        engine.local_training.follow(state["global_steps"])
        in_round = resume(
            path, state, groups, saved_state, engine.lr_scheduler, engine.loader, engine.loss_scaler,
            ranks=ranks, with_optimizer=load_optimizer_states,
        )  # fmt: skip
        engine.forget_micro_batches()
        engine.spikes.load_state_dict(state["spikes"])
        engine.local_training.load_state_dict(state["sync"], state["global_steps"], in_round=in_round)
        engine.go_on_after(state["global_steps"], state["global_samples"], state["skipped_steps"])
        if configured_rates and engine.lr_scheduler is not None:
            engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration)
        elif configured_rates:
            set_rates(optimizer, names, configured)
        if engine.global_rank == 0:
            if engine.lr_scheduler is None and state["scheduler"] is not None:
                kept = "configured" if configured_rates else "saved"
                log.warning(
                    "%s: has the state of a scheduler, but this run has no schedule; the %s rates apply", path, kept
                )
            changes = describe_changes(state["settings"], settings_to_save(engine.config, optimizer, names), names)
            log_changes(path, changes, engine.global_steps, configured_rates=configured_rates)
        return str(path), client
