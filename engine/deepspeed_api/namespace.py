"""Makes DeepSpeed's modules importable under ``sdp``, without importing any of them before it is
used.

``import sdp.comm`` gives the module ``sdp.engine.deepspeed_api.comm``. A module that is out of
scope can be imported, because scripts often import what they do not use. Its names say why they are
not there when they are called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ENGINE = (__package__ or "").rpartition(".")[0]
PACKAGE = _ENGINE.rpartition(".")[0]
# The names after "sdp.", and the modules of the engine. Submodules of DeepSpeed have all names of
# their parent.
MODULES = {
    "accelerator": "deepspeed_api.accelerator",
    "accelerator.real_accelerator": "deepspeed_api.accelerator",
    "checkpoint": "deepspeed_api.checkpoint",
    "checkpoint.constants": "deepspeed_api.constants",
    "checkpoint.utils": "deepspeed_api.checkpoint",
    "checkpointing": "deepspeed_api.checkpointing",
    "comm": "deepspeed_api.comm",
    "comm.comm": "deepspeed_api.comm",
    "constants": "deepspeed_api.constants",
    "dist": "deepspeed_api.comm",
    "env_report": "deepspeed_api.versions",
    "git_version_info": "deepspeed_api.versions",
    "integrations": "integrations",
    "integrations.accelerate": "integrations.accelerate",
    "integrations.lightning": "integrations.lightning",
    "launcher.constants": "deepspeed_api.launcher",
    "launcher.runner": "deepspeed_api.launcher",
    "ops": "deepspeed_api.ops",
    "ops.adam": "deepspeed_api.ops",
    "ops.adagrad": "deepspeed_api.ops",
    "ops.lamb": "deepspeed_api.ops",
    "ops.lion": "deepspeed_api.ops",
    "runtime": "deepspeed_api.runtime",
    "runtime.activation_checkpointing": "deepspeed_api.runtime",
    "runtime.activation_checkpointing.checkpointing": "deepspeed_api.checkpointing",
    "runtime.config": "deepspeed_api.constants",
    "runtime.constants": "deepspeed_api.constants",
    "runtime.dataloader": "deepspeed_api.utils",
    "runtime.engine": "deepspeed_api.runtime",
    "runtime.lr_schedules": "deepspeed_api.runtime",
    "runtime.utils": "deepspeed_api.utils",
    "runtime.zero": "deepspeed_api.zero",
    "runtime.zero.config": "deepspeed_api.zero",
    "runtime.zero.constants": "deepspeed_api.constants",
    "runtime.zero.offload_config": "deepspeed_api.zero",
    "runtime.zero.partition_parameters": "deepspeed_api.zero",
    "utils": "deepspeed_api.utils",
    "utils.init_on_device": "deepspeed_api.utils",
    "utils.logging": "deepspeed_api.utils",
    "utils.nvtx": "deepspeed_api.utils",
    "utils.tensor_fragment": "deepspeed_api.utils",
    "utils.torch": "deepspeed_api.versions",
    "utils.z3_leaf_module": "deepspeed_api.leaf_modules",
    "zero": "deepspeed_api.zero",
}
_INTERNAL = "this is an internal part of DeepSpeed, which is not offered here"
_COMPILER = "DeepSpeed's compiler is not supported; give training.compile"
_DISKS = "DeepSpeed's access to disks is not supported"
_PIPELINES = "pipelines are not supported; use sdp.groups with fsdp and tensor parallelism"
_SEQUENCE = "DeepSpeed's sequence parallelism is not supported; tensor_parallel.autotp_size cuts the sequence, too"
_ZERO = "give zero_optimization in the configuration; each backend has a ZeRO of its own"
# Modules that are not offered, or only in part. Their submodules are not offered for the same
# reason, if MODULES does not have them.
OUT_OF_SCOPE = {
    "autotuning": "DeepSpeed's autotuning is not supported; sdp plan shows memory and traffic of a configuration",
    "checkpoint": "checkpoints have a format of their own here, which any layout can read; sdp export, or "
    "engine.full_state_dict(), has the whole model",
    "compile": _COMPILER,
    "compression": "DeepSpeed's compression is not supported",
    "constants": _INTERNAL,
    "datastates": "checkpoints are written in the background with training.async_checkpoint",
    "elasticity": "DeepSpeed's elasticity is not supported",
    "inference": "DeepSpeed's inference is not supported; use engine.full_model(), or engine.save_pretrained(DIR) "
    "and a server",
    "io": _DISKS,
    "launcher.launch": "sdp launch starts ranks, and so does DeepSpeed's own launcher",
    "launcher.multinode_runner": "sdp launch starts ranks, and so does DeepSpeed's own launcher",
    "launcher.runner": "sdp launch starts ranks, and so does DeepSpeed's own launcher",
    "linear": "DeepSpeed's linear layers are not supported",
    "model_implementations": "DeepSpeed's inference is not supported",
    "module_inject": "DeepSpeed's kernel injection is not supported",
    "moe": "DeepSpeed's MoE layers are not supported; experts of the model itself train as other blocks do",
    "monitor": "give tensorboard or csv_monitor in the configuration and use engine.monitor",
    "nebula": "DeepSpeed's Nebula is not supported",
    "nvme": _DISKS,
    "ops.aio": _DISKS,
    "ops.deepspeed4science": "DeepSpeed's kernels are not supported",
    "ops.fp_quantizer": "DeepSpeed's kernels are not supported",
    "ops.gds": _DISKS,
    "ops.op_builder": "sdp compiles no kernels; the optimizers are torch's",
    "ops.sparse_attention": "DeepSpeed's sparse attention is not supported",
    "ops.transformer": "DeepSpeed's transformer kernels are not supported",
    "pipe": _PIPELINES,
    "profiling": "DeepSpeed's profilers are not supported; use training.profile or sdp bench",
    "runtime.base_optimizer": _INTERNAL,
    "runtime.bf16_optimizer": "give bf16 in the configuration; each backend has master weights of its own",
    "runtime.checkpoint_engine": "engine.save_checkpoint writes checkpoints of this project's format",
    "runtime.comm": _INTERNAL,
    "runtime.compiler": _COMPILER,
    "runtime.config": _INTERNAL,
    "runtime.config_utils": _INTERNAL,
    "runtime.constants": _INTERNAL,
    "runtime.csr_tensor": _INTERNAL,
    "runtime.data_pipeline": "DeepSpeed's data pipeline is not supported; order the data set itself",
    "runtime.domino": "DeepSpeed's Domino is not supported; give tensor_parallel.autotp_size",
    "runtime.eigenvalue": "DeepSpeed's compression is not supported",
    "runtime.engine": _INTERNAL,
    "runtime.fp16": "give fp16 or bf16 in the configuration; each backend has master weights of its own",
    "runtime.hybrid_engine": "DeepSpeed's hybrid engine is not supported; use engine.full_model()",
    "runtime.model_checkpointing": _INTERNAL,
    "runtime.pipe": _PIPELINES,
    "runtime.precision_config": "give fp16 or bf16 in the configuration",
    "runtime.progressive_layer_drop": "DeepSpeed's progressive layer drop is not supported",
    "runtime.quantize": "DeepSpeed's compression is not supported",
    "runtime.sequence_parallel": _SEQUENCE,
    "runtime.sparse_tensor": _INTERNAL,
    "runtime.state_dict_factory": _INTERNAL,
    "runtime.superoffload": "give zero_optimization.offload_optimizer in the configuration",
    "runtime.swap_tensor": _DISKS,
    "runtime.tensor_parallel": "give tensor_parallel.autotp_size in the configuration",
    "runtime.torch_autocast": "give torch_autocast in the configuration",
    "runtime.weight_quantizer": "DeepSpeed's compression is not supported",
    "runtime.zenflow": "ZenFlow is not supported",
    "runtime.zero.config": _ZERO,
    "runtime.zero.constants": _INTERNAL,
    "runtime.zero.linear": _ZERO,
    "runtime.zero.offload_states": _ZERO,
    "runtime.zero.parameter_offload": _ZERO,
    "runtime.zero.partitioned_param_coordinator": _ZERO,
    "runtime.zero.stage1": _ZERO,
    "runtime.zero.stage2": _ZERO,
    "runtime.zero.stage3": _ZERO,
    "runtime.zero.stage_1_and_2": _ZERO,
    "runtime.zero.tiling": "DeepSpeed's tiled layers are not supported",
    "runtime.zero.utils": _ZERO,
    "sequence": _SEQUENCE,
    "utils.bwc": _INTERNAL,
    "utils.comms_logging": "engine.traffic counts the bytes that this rank has sent",
    "utils.debug": _INTERNAL,
    "utils.groups": "DeepSpeed's process groups are not supported; engine.layout.mesh has the layout",
    "utils.mixed_precision_linkage": _INTERNAL,
    "utils.numa": "ranks are not bound to cores here",
    "utils.timer": "wall_clock_breakdown in the configuration prints the times of a step",
    "utils.zero_to_fp32": "a checkpoint here has the whole model already; use sdp export, or engine.full_state_dict()",
}
# Names of the package itself.
NAMES_OUT_OF_SCOPE = {
    "DeepSpeedDataLoader": "engine.deepspeed_io makes a loader, and so does training_data of sdp.initialize",
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


def attributes(home: str, refused: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module of this package.

    It finds submodules of DeepSpeed that no statement has imported, as DeepSpeed's own modules do.
    Names that are out of scope are found, too: scripts import them and often do not use them.

    Args:
        home: ``__name__`` of the module.
        refused: Names that are out of scope, with the reason. For other names, the reason of the
            module itself holds, if it is offered only in part.
    """
    names = [name for name, file in MODULES.items() if home == f"{_ENGINE}.{file}"]

    def get(attribute: str) -> Any:
        if not attribute.startswith("_"):
            for name in names:
                path = f"{name}.{attribute}"
                if path in MODULES or path in OUT_OF_SCOPE:
                    return importlib.import_module(f"{PACKAGE}.{path}")
            if attribute in (refused or {}):
                return refusing(f"{names[0]}.{attribute}", (refused or {})[attribute])
            reasons = [OUT_OF_SCOPE[name] for name in names if name in OUT_OF_SCOPE]
            if reasons:
                return refusing(f"{names[0]}.{attribute}", reasons[0])
        raise AttributeError(f"module {names[0]!r} has no attribute {attribute!r}")

    return get


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
