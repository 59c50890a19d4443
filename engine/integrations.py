"""Trains with SDP under Accelerate and the Trainer of transformers, in place of DeepSpeed.

After :func:`install`, a DeepSpeed configuration with a section ``sdp`` trains with SDP. Without
:func:`install`, DeepSpeed ignores this section and trains the whole model on every rank.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .engine import SDPEngine
from .environment.detect import detect
from .errors import ConfigError
from .initialize import initialize


class AcceleratedEngine:
    """Wraps an SDP engine so that Accelerate and the Trainer can use it like DeepSpeed's engine.

    In evaluation mode, it runs the full model, which is gathered before the first batch and freed
    when training continues. Other attributes are those of the engine and of the model.
    """

    def __init__(self, engine: SDPEngine, config: dict[str, Any], deepspeed_engine: type):
        self.engine, self.config = engine, config
        self._deepspeed_engine = deepspeed_engine
        self._full: nn.Module | None = None
        self._gathered = ExitStack()
        weakref.finalize(self, self._gathered.close)  # at the latest before Python unloads its modules
        if engine.runs_subnetwork or len(engine.config.sdp.maskings) > 1:
            engine.evaluation.is_replaced = True
            self._replace_forward(engine.module)
        engine.optimizer.overflow = False  # type: ignore[attr-defined]  # Accelerate's schedule waits after a skip

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """DeepSpeed's class, for ``isinstance``: Accelerate then finds the model in ``module``."""
        return self._deepspeed_engine

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "engine" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.engine, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    forward = __call__

    def _replace_forward(self, module: nn.Module) -> None:
        """Make ``module`` run the full model in evaluation mode.

        In evaluation, the Trainer calls ``module`` instead of the engine.
        """
        native_forward = module.forward

        @functools.wraps(native_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if module.training or self.engine.evaluation.is_running:
                return native_forward(*args, **kwargs)
            if self._full is None:
                self._full = self._gathered.enter_context(self.engine.full_model())
            return self._full(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]

    def train(self, mode: bool = True) -> AcceleratedEngine:
        """Set the training or evaluation mode. Training frees the full model of an evaluation."""
        if mode:
            self._free()
        self.engine.train(mode)
        return self

    def eval(self) -> AcceleratedEngine:
        return self.train(False)

    def step(self) -> None:
        self._free()
        self.engine.step()
        self.engine.optimizer.overflow = self.engine.was_step_skipped  # type: ignore[attr-defined]

    def _free(self) -> None:
        self._full = None
        self._gathered.close()

    def save_checkpoint(
        self, save_dir: str | Path, tag: Any = None, client_state: Any = None, exclude_frozen_parameters: bool = False,
        **options: Any
    ) -> bool:  # fmt: skip
        """Save a checkpoint to ``global_stepN``, the folder name that the Trainer looks for."""
        tag = f"global_step{self.engine.global_steps}" if tag is None else tag
        return self.engine.save_checkpoint(save_dir, tag, client_state, **options)

    def load_checkpoint(
        self, load_dir: str | Path, tag: Any = None, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint of :meth:`save_checkpoint`, with all weights."""
        options.pop("load_module_strict", None)
        self._free()
        return self.engine.load_checkpoint(load_dir, tag, **options)


def install() -> None:
    """Make Accelerate and the Trainer use SDP if DeepSpeed's configuration has a section ``sdp``.

    Call this once, before ``Accelerator(...)`` or ``TrainingArguments(...)``. Without the section,
    they still use DeepSpeed. A script's own calls of ``deepspeed.initialize`` do not change.

    Raises ConfigError if accelerate or deepspeed is not installed.
    """
    try:
        import deepspeed
        from accelerate import Accelerator
    except ImportError as error:
        raise ConfigError(
            f"sdp.integrations: needs accelerate and deepspeed ({error}); run pip install 'sdp-engine[integrations]'"
        ) from None
    from .stores.deepspeed.private import keep_gloo  # deepspeed is optional

    if not torch.cuda.is_available():
        keep_gloo()
    if not hasattr(Accelerator.prepare, "is_sdp"):
        Accelerator.prepare = _prepare(Accelerator.prepare, deepspeed)  # type: ignore[method-assign]
        Accelerator.get_state_dict = _whole_state(Accelerator.get_state_dict)  # type: ignore[method-assign]


def _prepare(of_accelerate: Any, deepspeed: Any) -> Any:
    @functools.wraps(of_accelerate)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        _require_deepspeed(self)
        of_deepspeed = deepspeed.initialize
        deepspeed.initialize = _choose(of_deepspeed, deepspeed.DeepSpeedEngine)
        try:
            return of_accelerate(self, *args, **kwargs)
        finally:
            deepspeed.initialize = of_deepspeed

    prepare.is_sdp = True  # type: ignore[attr-defined]
    return prepare


def _require_deepspeed(accelerator: Any) -> None:
    """Raise ConfigError if Accelerate ignores its configuration of DeepSpeed."""
    from accelerate.utils import DistributedType, parse_flag_from_env

    kind = accelerator.distributed_type
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") and kind != DistributedType.DEEPSPEED:
        raise ConfigError(
            f"sdp.integrations: Accelerate trains with {kind.value} instead of DeepSpeed, so SDP would not run; remove "
            "cpu=True and ACCELERATE_USE_CPU. To train on CPUs, pass "
            'kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to Accelerator'
        )


def _require_all_ranks() -> None:
    """Raise ConfigError if Accelerate was started with fewer processes than SDP."""
    from accelerate.state import PartialState

    environment, known = detect(), PartialState().num_processes
    ranks = dist.get_world_size() if dist.is_initialized() else environment.world_size if environment else 1
    if known != ranks:
        raise ConfigError(
            f"sdp.integrations: Accelerate knows {known} of the {ranks} ranks, so ranks would read the same samples; "
            "on CPUs, pass use_cpu=True to TrainingArguments, or "
            'kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] to Accelerator'
        )


def _choose(of_deepspeed: Any, deepspeed_engine: type) -> Any:
    def start(*args: Any, config_params: Any = None, **kwargs: Any) -> Any:
        if "sdp" not in config_params:
            return of_deepspeed(*args, config_params=config_params, **kwargs)
        if (config_params["sdp"] or {}).get("engine") == "deepspeed":
            raise ConfigError('sdp.engine: "deepspeed" does not run under Accelerate and the Trainer; use "fsdp2"')
        _require_all_ranks()
        engine, optimizer, loader, scheduler = initialize(*args, config=config_params, **kwargs)
        return AcceleratedEngine(engine, config_params, deepspeed_engine), optimizer, loader, scheduler

    return start


def _whole_state(of_accelerate: Any) -> Any:
    @functools.wraps(of_accelerate)
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        if isinstance(getattr(model, "engine", None), SDPEngine):
            return model.engine.full_state_dict() or {}
        return of_accelerate(self, model, unwrap)

    return get_state_dict
