"""Makes DeepSpeed's modules importable under ``sdp``, without importing any of them before it is
used.

``import sdp.comm`` gives the module ``sdp.engine.deepspeed_api.comm``. A module that is out of
scope can be imported, because scripts often import what they do not use. Its names say why they are
not there when they are called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ENGINE = (__package__ or "").rpartition(".")[0]
# The names after "sdp.", and the modules of the engine. Submodules of DeepSpeed have all names of
# their parent.
MODULES = {
    "accelerator": "deepspeed_api.accelerator",
    "accelerator.real_accelerator": "deepspeed_api.accelerator",
    "checkpointing": "deepspeed_api.checkpointing",
    "comm": "deepspeed_api.comm",
    "comm.comm": "deepspeed_api.comm",
    "integrations": "integrations",
    "integrations.accelerate": "integrations.accelerate",
    "integrations.lightning": "integrations.lightning",
    "ops": "deepspeed_api.ops",
    "ops.adam": "deepspeed_api.ops",
    "ops.adagrad": "deepspeed_api.ops",
    "ops.lamb": "deepspeed_api.ops",
    "ops.lion": "deepspeed_api.ops",
    "runtime": "deepspeed_api.runtime",
    "runtime.activation_checkpointing": "deepspeed_api.runtime",
    "runtime.activation_checkpointing.checkpointing": "deepspeed_api.checkpointing",
    "runtime.dataloader": "deepspeed_api.utils",
    "runtime.lr_schedules": "deepspeed_api.runtime",
    "runtime.utils": "deepspeed_api.utils",
    "runtime.zero": "deepspeed_api.zero",
    "runtime.zero.partition_parameters": "deepspeed_api.zero",
    "utils": "deepspeed_api.utils",
    "utils.logging": "deepspeed_api.utils",
    "zero": "deepspeed_api.zero",
}
OUT_OF_SCOPE = {
    "autotuning": "DeepSpeed's autotuning is not supported; sdp plan shows memory and traffic of a configuration",
    "compression": "DeepSpeed's compression is not supported",
    "elasticity": "DeepSpeed's elasticity is not supported",
    "inference": "DeepSpeed's inference is not supported; use engine.full_model(), or engine.save_pretrained(DIR) "
    "and a server",
    "linear": "DeepSpeed's linear layers are not supported",
    "model_implementations": "DeepSpeed's inference is not supported",
    "module_inject": "DeepSpeed's kernel injection is not supported",
    "moe": "DeepSpeed's MoE layers are not supported; experts of the model itself train as other blocks do",
    "monitor": "give tensorboard or csv_monitor in the configuration and use engine.monitor",
    "nebula": "DeepSpeed's Nebula is not supported",
    "ops.deepspeed4science": "DeepSpeed's kernels are not supported",
    "ops.sparse_attention": "DeepSpeed's sparse attention is not supported",
    "ops.transformer": "DeepSpeed's transformer kernels are not supported",
    "pipe": "pipelines are not supported; use sdp.groups with fsdp and tensor parallelism",
    "profiling": "DeepSpeed's profilers are not supported; use training.profile or sdp bench",
    "runtime.compiler": "DeepSpeed's compiler is not supported; give training.compile",
    "runtime.data_pipeline": "DeepSpeed's data pipeline is not supported; order the data set itself",
    "runtime.pipe": "pipelines are not supported; use sdp.groups with fsdp and tensor parallelism",
    "sequence": "DeepSpeed's sequence parallelism is not supported; tensor_parallel.autotp_size cuts the sequence, too",
    "utils.groups": "DeepSpeed's process groups are not supported; engine.layout.mesh has the layout",
    "utils.zero_to_fp32": "a checkpoint here has the whole model already; use sdp export, or engine.full_state_dict()",
}
# Names of the package itself.
NAMES_OUT_OF_SCOPE = {
    "DeepSpeedHybridEngine": OUT_OF_SCOPE["inference"],
    "DeepSpeedInferenceConfig": OUT_OF_SCOPE["inference"],
    "DeepSpeedTransformerConfig": OUT_OF_SCOPE["ops.transformer"],
    "DeepSpeedTransformerLayer": OUT_OF_SCOPE["ops.transformer"],
    "InferenceEngine": OUT_OF_SCOPE["inference"],
    "PipelineEngine": OUT_OF_SCOPE["pipe"],
    "PipelineModule": OUT_OF_SCOPE["pipe"],
    "default_inference_config": OUT_OF_SCOPE["inference"],
    "init_inference": OUT_OF_SCOPE["inference"],
    "replace_transformer_layer": OUT_OF_SCOPE["module_inject"],
    "tp_model_init": "give tensor_parallel.autotp_size in the configuration",
}


class _Refusing(type):
    """The type of names that are out of scope. Their attributes are, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return refusing(f"{cls.__name__}.{name}", cls.__doc__ or "")


def refusing(name: str, reason: str) -> type:
    """Return a class that raises :class:`~sdp.engine.deepspeed_names.OutOfScopeError` when it is
    called.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        from ..deepspeed_names import OutOfScopeError

        raise OutOfScopeError(f"sdp.{name}: {reason}")

    return _Refusing(name.rpartition(".")[2], (), {"__new__": refuse, "__doc__": reason})


class DeepSpeedModules(MetaPathFinder, Loader):
    """Finds and loads the modules of DeepSpeed's namespace under another package's name."""

    def __init__(self, package: str):
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != self._package or not (name in MODULES or self._reason(name)):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name.partition(".")[2]
        if name in MODULES:
            module = importlib.import_module(f"{_ENGINE}.{MODULES[name]}")
            self._own_specs = {**getattr(self, "_own_specs", {}), spec.name: module.__spec__}
            return module
        reason = self._reason(name)
        module = ModuleType(spec.name, reason)
        module.__path__ = []

        def get(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(f"module {spec.name!r} has no attribute {attribute!r}")
            return refusing(f"{name}.{attribute}", reason)

        module.__dict__["__getattr__"] = get
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give a module back its own name, which the import system has just replaced."""
        for name, spec in getattr(self, "_own_specs", {}).items():
            if module.__spec__ is not None and module.__spec__.name == name:
                module.__spec__ = spec

    @staticmethod
    def _reason(name: str) -> str:
        """Return why the module ``name`` is out of scope; nothing if it is not."""
        parts = name.split(".")
        parents = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((OUT_OF_SCOPE[parent] for parent in parents if parent in OUT_OF_SCOPE), "")


def install(package: str) -> None:
    """Make the modules importable under ``package``."""
    if not any(isinstance(finder, DeepSpeedModules) for finder in sys.meta_path):
        # First, because the folder of a package would otherwise be searched for its modules, too.
        sys.meta_path.insert(0, DeepSpeedModules(package))
