"""Accelerate, and the Trainer of transformers: they call DeepSpeed, and SDP takes its place.

After :func:`install`, a DeepSpeed configuration with a section ``sdp`` trains with SDP. Without
:func:`install`, DeepSpeed ignores that section and trains the whole model on every rank.
"""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config.load import read_raw
from .engine import SDPEngine
from .errors import ConfigError
from .initialize import initialize

log = logging.getLogger("sdp")

_TAG = "global_step{}"  # the Trainer looks for directories of this name


class AcceleratedEngine:
    """An SDP engine in the form that Accelerate and the Trainer expect of DeepSpeed's engine.

    Other names are those of the engine, and of the model. In evaluation mode, the full model runs:
    it is gathered before the first batch and freed when training goes on.
    """

    def __init__(self, engine: SDPEngine, config: dict[str, Any], deepspeed_engine: type):
        """``config`` is DeepSpeed's configuration; ``deepspeed_engine`` is the class that this
        object stands for.
        """
        self.engine, self.config = engine, config
        self._deepspeed_engine = deepspeed_engine
        self._full: nn.Module | None = None
        self._gathered = ExitStack()
        if engine.runs_subnetwork or len(engine.config.sdp.maskings) > 1:
            engine.evaluation.is_replaced = True
            self._replace_forward(engine.module)
        # Accelerate asks the optimizer whether the last step was skipped. The schedule then waits.
        engine.optimizer.overflow = False  # type: ignore[attr-defined]

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """DeepSpeed's class: ``isinstance`` tells Accelerate that the model is in ``module``."""
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

        The Trainer calls the module itself there.
        """
        own = module.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if module.training or self.engine.evaluation.is_running:
                return own(*args, **kwargs)
            if self._full is None:
                self._full = self._gathered.enter_context(self.engine.full_model())
            return self._full(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]

    def train(self, mode: bool = True) -> AcceleratedEngine:
        """Set the mode. Training frees the full model that evaluation has gathered."""
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
        """Save to a directory that the Trainer finds again."""
        tag = _TAG.format(self.engine.global_steps) if tag is None else tag
        return self.engine.save_checkpoint(save_dir, tag, client_state, **options)

    def load_checkpoint(
        self, load_dir: str | Path, tag: Any = None, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Load what :meth:`save_checkpoint` has saved. All weights are loaded."""
        options.pop("load_module_strict", None)
        self._free()
        return self.engine.load_checkpoint(load_dir, tag, **options)


def install() -> None:
    """Make Accelerate and the Trainer train with SDP where DeepSpeed's configuration has a section
    ``sdp``.

    Call it once, before ``Accelerator(...)`` or ``Trainer(...)``. A configuration without the
    section still goes to DeepSpeed.

    Raises:
        ConfigError: accelerate or deepspeed is not installed.
    """
    try:
        import deepspeed
        from accelerate import Accelerator
    except ImportError as error:
        raise ConfigError(
            f"sdp.integrations: needs accelerate and deepspeed ({error}); run pip install 'sdp-engine[integrations]'"
        ) from None
    if not torch.cuda.is_available():
        # DeepSpeed would compile an extension for its own collectives, which takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if getattr(deepspeed.initialize, "is_sdp", False):
        return
    deepspeed.initialize = _choose(deepspeed.initialize, deepspeed.DeepSpeedEngine)
    Accelerator.get_state_dict = _whole_state(Accelerator.get_state_dict)  # type: ignore[method-assign]


def _choose(of_deepspeed: Any, deepspeed_engine: type) -> Any:
    @functools.wraps(of_deepspeed)
    def start(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("config") or kwargs.get("config_params")
        given = given or getattr(kwargs.get("args"), "deepspeed_config", None)
        config = read_raw(given) if isinstance(given, str | Path) and Path(given).is_file() else given
        if not isinstance(config, dict) or "sdp" not in config:
            return of_deepspeed(*args, **kwargs)
        if (config["sdp"] or {}).get("engine") == "deepspeed":
            raise ConfigError('sdp.engine: "deepspeed" does not run under Accelerate and the Trainer; use "fsdp2"')
        engine, optimizer, loader, scheduler = initialize(*args, **kwargs)
        return AcceleratedEngine(engine, config, deepspeed_engine), optimizer, loader, scheduler

    start.is_sdp = True  # type: ignore[attr-defined]
    return start


def _whole_state(of_accelerate: Any) -> Any:
    @functools.wraps(of_accelerate)
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        if isinstance(getattr(model, "engine", None), SDPEngine):
            return model.engine.full_state_dict() or {}
        return of_accelerate(self, model, unwrap)

    return get_state_dict
