"""Lightning: a strategy that trains with SDP.

    trainer = Trainer(strategy=SDPStrategy("ds.json"), devices=4)

It needs the package ``lightning``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from ..config.load import load_config
from ..config.schema import Config
from ..engine import SDPEngine
from ..environment.detect import Environment, exported
from ..errors import ConfigError
from ..initialize import initialize
from .lightning_network import Network, has_tensors

_TAG = "engine"


class EnginePrecision(Precision):
    """Leaves the backward pass, clipping and the step to the engine."""

    def __init__(self, strategy: SDPStrategy) -> None:
        self._strategy = strategy

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._strategy.run_backward(tensor)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        with self._strategy.at_boundary():
            result = closure()
            if result is None:
                raise ConfigError(
                    "SDPStrategy: training_step returned None, but every rank takes part in every step; return a loss"
                )
            self._after_closure(model, optimizer)
            self._strategy.engine.step()
        return result

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine clips by the full model's norm."""


class SDPStrategy(DDPStrategy):
    """Makes the Trainer of Lightning train with an SDP engine.

    The configuration is DeepSpeed's, with a section ``sdp``. These come from the Trainer:
    ``accumulate_grad_batches``, ``gradient_clip_val``, the data, the optimizer, and the schedule.
    Evaluation runs the full model, which is gathered before the first batch and freed afterwards.
    A checkpoint is a file of Lightning with the whole model's weights, and a folder of the engine
    next to it, from which a run resumes.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], **options: Any) -> None:
        """Choose the configuration.

        Args:
            config: A path or a mapping.
            options: Those of Lightning's DDPStrategy, such as ``cluster_environment``.

        Raises:
            ConfigError: The configuration has an error.
        """
        super().__init__(**options)
        self._settings = config
        self._engine: SDPEngine | None = None
        self._full = ExitStack()
        self._steps_now = False
        self._loaded_from: str | Path = ""

    @property
    def engine(self) -> SDPEngine:
        """The engine. It exists while the Trainer fits."""
        if self._engine is None:
            raise ConfigError("SDPStrategy: there is no engine before Trainer.fit")
        return self._engine

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else EnginePrecision(self)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        plugin = precision_plugin
        if plugin is not None and type(plugin) is not Precision and not isinstance(plugin, EnginePrecision):
            raise ConfigError(
                f"SDPStrategy: precision {plugin.precision!r} cannot be honoured; leave the Trainer's precision out "
                "and set bf16 or fp16 in the configuration"
            )
        self._precision_plugin = None if plugin is None else EnginePrecision(self)

    # -- training --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Make the engine. To validate, test or predict alone, the module is left as it is."""
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        if self._engine is not None and self._engine.module._modules is module._modules:
            self.accelerator.setup(trainer)  # the Trainer has fitted this module before
            return
        self._engine = None
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if not module.automatic_optimization:
            raise ConfigError(
                "SDPStrategy: manual optimization is not supported; use sdp.initialize in a loop of your own"
            )
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(f"SDPStrategy: configure_optimizers gave {len(self.optimizers)} optimizers; give one")
        own = self.optimizers[0] if isinstance(self.optimizers[0], Optimizer) else None
        config = self._config_for(trainer)
        with exported(self._environment().variables()):  # Lightning's own launcher sets some of them only
            self._engine, optimizer, _, schedule = initialize(model=Network(module), optimizer=own, config=config)
        if schedule is not None and self.lr_scheduler_configs:
            raise ConfigError(
                "SDPStrategy: the configuration has a scheduler and configure_optimizers gives one, too; leave one out"
            )
        self.optimizers = [optimizer]
        self._engine.evaluation.is_replaced = True
        module.to(self._engine.device)

    def _environment(self) -> Environment:
        """What Lightning knows of this process, on one or several nodes."""
        cluster = self.cluster_environment
        assert cluster is not None
        return Environment(
            self.global_rank, self.world_size, self.local_rank, self.num_processes, self.node_rank,
            cluster.main_address, cluster.main_port, "Lightning",
        )  # fmt: skip

    def _config_for(self, trainer: Trainer) -> Config:
        """The configuration, with what the Trainer says about accumulation and clipping."""
        config = load_config(self._settings)
        if config.sdp.in_one_process or config.sdp.engine == "deepspeed":
            raise ConfigError(f'sdp.engine: "{config.sdp.engine}" does not run under Lightning; use "fsdp2"')
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            raise ConfigError(
                f"SDPStrategy: gradient_clip_algorithm {str(trainer.gradient_clip_algorithm)!r} cannot be honoured; "
                'leave it at "norm"'
            )
        said: dict[str, tuple[str, float]] = {
            "gradient_accumulation_steps": ("accumulate_grad_batches", trainer.accumulate_grad_batches)
        }
        if trainer.gradient_clip_val:
            said["gradient_clipping"] = ("gradient_clip_val", float(trainer.gradient_clip_val))
        for key, (name, value) in said.items():
            if key in config.model_fields_set and getattr(config, key) != value:
                raise ConfigError(
                    f"SDPStrategy: {key} is {getattr(config, key)} in the configuration, and the Trainer's {name} is "
                    f"{value}; give it to the Trainer only"
                )
        return load_config(self._settings, [f"{key}={value}" for key, (_, value) in said.items()])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self.engine(self.lightning_module.training_step, *args, **kwargs)

    def run_backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss``, which Lightning has divided by the accumulation."""
        engine = self.engine
        if not self._steps_now:
            engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss * engine.gradient_accumulation_steps())
        if not self._steps_now:
            engine.step()  # counts the micro-batch
            engine.set_gradient_accumulation_boundary(None)

    @contextmanager
    def at_boundary(self) -> Iterator[None]:
        """A context in which the backward pass is the last one before a step.

        Lightning decides that, because the last step of an epoch may have fewer micro-batches.
        """
        self.engine.set_gradient_accumulation_boundary(True)
        self._steps_now = True
        try:
            yield
        finally:
            self._steps_now = False
            self.engine.set_gradient_accumulation_boundary(None)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._engine is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self._engine.dp_world_size, "rank": self._engine.get_data_parallel_rank()}

    # -- evaluation ------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Make the LightningModule run the full model. Collective."""
        module = self.lightning_module
        if self._engine is None or module is None:
            return
        # Tensors of inference mode must not reach the training model.
        with torch.inference_mode(False), torch.no_grad():
            full = self._full.enter_context(self._engine.full_model())
        own = {name: module.__dict__[name] for name in ("_modules", "_parameters", "_buffers")}
        # Metrics have neither parameters nor buffers, and keep what they have counted.
        module.__dict__["_modules"] = {
            name: full._modules[name] if child is not None and has_tensors(child) else child
            for name, child in own["_modules"].items()
        }
        module.__dict__["_parameters"], module.__dict__["_buffers"] = full._parameters, full._buffers
        self._full.callback(module.__dict__.update, own)
        full.train(module.training)

    def _free(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._full.close()

    on_validation_start = on_test_start = on_predict_start = _gather
    on_validation_end = on_test_end = on_predict_end = _free

    # -- checkpoints -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's weights on rank 0, and nothing elsewhere. Collective."""
        if self._engine is None:
            return super().lightning_module_state_dict()
        return self._engine.full_state_dict() or {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: the engine's folder has it."""
        return {} if self._engine is not None else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's file, and the engine's folder unless only weights are saved."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._engine is not None and "optimizer_states" in checkpoint:
            self.barrier()
            self._engine.save_checkpoint(folder_of(filepath), _TAG)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(folder_of(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's file. Nothing is unpickled unless ``weights_only`` is False."""
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only is not False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the engine's folder next to the file that was read. Collective."""
        if self._engine is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        folder = folder_of(self._loaded_from)
        if not folder.is_dir():
            raise ConfigError(
                f"SDPStrategy: {self._loaded_from} has weights only, without the folder {folder.name}; load them into "
                "the module before Trainer.fit"
            )
        self._engine.load_checkpoint(folder, _TAG)

    def teardown(self) -> None:
        """Leave the model where it is: the engine goes on if the Trainer does."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._full.close()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def folder_of(checkpoint: str | Path) -> Path:
    """The folder of the engine's checkpoint that belongs to Lightning's file ``checkpoint``."""
    return Path(f"{checkpoint}.sdp")
