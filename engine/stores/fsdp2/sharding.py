"""Applies FSDP2 to a rank's model.

This is the only file that uses FSDP2's internals: it counts the bytes of collectives, and accesses
gradients that are not reduced yet. It refuses forward passes for which FSDP2 would compute wrong
results, or would fail with an unclear error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...distributed.collectives import Traffic
from ...errors import ConfigError, ModelError


class CountingAllGather(DefaultAllGather):
    """FSDP2's default all-gather, which also counts the bytes of the whole buffer."""

    def __init__(self, traffic: Traffic):
        self._traffic = traffic

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._traffic.record("inside groups", "all_gather", output_tensor.nbytes, dist.get_process_group_ranks(group))
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CountingReduceScatter(DefaultReduceScatter):
    """FSDP2's default reduce-scatter, which also counts the bytes of the whole buffer."""

    def __init__(self, traffic: Traffic):
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        ranks = dist.get_process_group_ranks(group)
        self._traffic.record("inside groups", "reduce_scatter", input_tensor.nbytes, ranks)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def gather_stream(module: nn.Module) -> torch.Stream | None:
    """The CUDA stream on which FSDP2 copies the module's shards before it gathers them.

    This stream does not wait for the current stream, so both streams must wait for new weights. The
    result is None without CUDA, and before the first forward pass.
    """
    if not isinstance(module, FSDPModule) or not torch.cuda.is_available():
        return None
    # The first forward pass creates the stream.
    return getattr(module._get_fsdp_state()._comm_ctx, "all_gather_copy_in_stream", None)


def drop_unreduced_gradients(module: FSDPModule) -> None:
    """Drop gradients of the module's parameters that FSDP2 has not reduced.

    FSDP2 has such gradients between micro-batches if it reduces gradients once per step.
    """
    for parameter in _parameters(module):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def zero_missing_gradients(root: nn.Module) -> None:
    """Give zero gradients to parameters of ``root`` that no earlier micro-batch of the step used.

    FSDP2 keeps gradients of earlier micro-batches in float32. Without the zeros, a parameter that
    only the last micro-batch uses has a gradient in compute precision, and FSDP2 fails.
    """
    for module in root.modules():
        for parameter in _parameters(module) if isinstance(module, FSDPModule) else ():
            if parameter.reduce_dtype is None or parameter.unsharded_accumulated_grad is not None:
                continue
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.requires_grad and whole.dtype != parameter.reduce_dtype:
                parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=parameter.reduce_dtype)


@contextmanager
def root_stays_gathered(root: nn.Module, *, reshards: bool, at_end: Callable[[], None]) -> Iterator[None]:
    """A context in which the root's own parameters stay gathered after a forward pass.

    Args:
        root: the model to which FSDP2 is applied.
        reshards: whether the parameters are freed after a forward pass outside the context.
        at_end: called at the end, to shard the parameters again.
    """
    if not isinstance(root, FSDPModule):
        yield
        return
    root.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        root.set_reshard_after_forward(reshards, recurse=False)
        at_end()


def unreduced_gradients(module: FSDPModule) -> list[torch.Tensor]:
    """Return gradients of earlier micro-batches that FSDP2 has not reduced yet."""
    kept = [parameter.unsharded_accumulated_grad for parameter in _parameters(module)]
    return [gradient for gradient in kept if gradient is not None]


def forget_root(root: nn.Module) -> None:
    """Make FSDP2 search ``root`` for sharded modules again.

    Call this after blocks of ``root`` were replaced. FSDP2 searches in the first pass only.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            state._is_root = None
            if module is root:
                state._state_ctx.all_states.clear()


def _parameters(module: FSDPModule) -> list[Any]:
    return [parameter for group in parameter_groups(module) for parameter in group.fsdp_params]


def parameter_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    # Since torch 2.13, a module may have several parameter groups.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def refuse_hidden_results(module: nn.Module, name: str) -> None:
    """Make ``module`` raise ModelError if it returns tensors in objects that FSDP2 does not search.

    FSDP2 adds a hook to every tensor that it finds in the result. In backward, the hook gathers the
    parameters again. If FSDP2 misses a tensor, backward runs with parameters that are not gathered.

    ``name`` is the path of the module in the model. "" is the model itself.
    """

    def check(module: nn.Module, _: Any, result: Any) -> None:
        if not torch.is_grad_enabled() or isinstance(result, torch.Tensor):
            return
        seen = {id(tensor) for tensor in _tensors_that_fsdp_finds(result)}
        for leaf in tree_leaves(result):
            if any(id(tensor) not in seen for tensor in _tensors_inside(leaf)):
                raise ModelError(
                    f"{name or 'the model'} returns tensors in a {type(leaf).__name__}, which FSDP2 does not search; "
                    "return a tensor, or tensors in a tuple, list or dict"
                )

    module.register_forward_hook(check)


def refuse_inference_mode(model: nn.Module) -> None:
    """Make a direct call of the sharded ``model`` in inference mode raise ModelError.

    FSDP2 would gather parameters into tensors that training cannot use afterwards. A call of
    ``engine(batch)`` is allowed, because the engine replaces the mode by ``torch.no_grad()``.
    """

    def check(*_: Any) -> None:
        if torch.is_inference_mode_enabled():
            raise ModelError(
                "engine.module is called inside torch.inference_mode(), after which FSDP2 cannot train; call "
                "engine(batch), or use torch.no_grad()"
            )

    model.register_forward_pre_hook(check, prepend=True)


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError if a parameter has a gradient hook, because FSDP2 would never run it."""
    hooked = next((name for name, parameter in parameters.items() if parameter._backward_hooks), None)
    if hooked is not None:
        raise ModelError(
            f"parameter {hooked!r} has a hook, which FSDP2 would not run; use "
            "register_post_accumulate_grad_hook, or change the gradient inside the model"
        )


def refuse_whole_state(model: nn.Module) -> None:
    """Make ``load_state_dict`` of a sharded model raise ModelError if it gets whole tensors."""

    def check(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                raise ModelError(
                    f"engine.module.load_state_dict: {name} is a shard here, but the state has the whole tensor; "
                    "load the "
                    "weights before sdp.initialize, or call engine.load_checkpoint"
                )

    model.register_load_state_dict_pre_hook(check)


def _tensors_that_fsdp_finds(result: Any) -> list[torch.Tensor]:
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors  # looks into dataclasses, too
    except ImportError:  # before torch 2.13
        return _tensors_of(tree_leaves(result))
    return list(collect_grad_tensors(result))


def _tensors_inside(leaf: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient in ``leaf``, or in its attributes."""
    return _tensors_of([leaf] if isinstance(leaf, torch.Tensor) else tree_leaves(getattr(leaf, "__dict__", None)))


def _tensors_of(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


# Attributes of FSDP2's parameter groups that this file reads or replaces.
_NAMES = "post_backward finalize_backward fsdp_params reduce_grads _training_state".split()


class ModuleUses:
    """Watches how often passes use one FSDP2 module, so that FSDP2 reduces correct gradients.

    Unused parameters of a sharded module get zero gradients. FSDP2 itself leaves out unused
    parameters. So if ranks used different parameters, FSDP2 would add up gradients of different
    parameters without an error.

    Args:
        module: The module, to which FSDP2 is applied.
        name: The path of the module in the model. "" is the model itself.
        groups: FSDP2's groups of the module's parameters.
        sharded: Whether the module is divided among several ranks.

    Raises:
        ConfigError: The FSDP2 of this version of torch lacks an attribute that SDP uses.
    """

    def __init__(self, module: nn.Module, name: str, groups: Sequence[Any], *, sharded: bool):
        missing = [name for name in _NAMES for group in groups if not hasattr(group, name)]
        if missing:
            raise ConfigError(
                f"torch {torch.__version__}: FSDP2 has no {missing[0]}, which sdp needs; install the version of torch "
                "that README.md names as tested"
            )
        self.name, self.sharded = name, sharded
        self.is_used = False  # in the newest forward pass
        self._groups = groups
        self._forwards = 0  # forward passes with gradients, since the last backward pass
        self._held_back: list[Any] = []
        self._ended: list[Any] = []
        module.register_forward_pre_hook(self._begin, prepend=True)  # before FSDP2's own
        for group in groups:
            group.post_backward = partial(self._end, group, group.post_backward)

    def begin_backward(self) -> None:
        """Prepare for a backward pass. Call this after ``set_requires_gradient_sync`` of FSDP2."""
        self._ended.clear()
        is_late = not self.sharded and self._forwards > 1
        self._held_back = [group for group in self._groups if group.reduce_grads] if is_late else []
        for group in self._held_back:
            group.reduce_grads = False

    def end_backward(self) -> None:
        """Reduce gradients now, if several forward passes have used a module with one shard."""
        self._forwards = 0
        for group in self._held_back:
            group.reduce_grads = True
            group.post_backward()
            group.finalize_backward()

    def _begin(self, *_: Any) -> None:
        self.is_used = True
        if not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:
            self._forwards += 1
            self._ended.clear()  # the backward pass of another engine may have gone through the module
        elif any(group._training_state.name == "POST_BACKWARD" for group in self._groups):
            # A reentrant checkpoint runs the module again, and FSDP2 would not gather it.
            raise self._refusal()

    def _end(self, group: Any, reduce: Any) -> None:
        if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
            return  # no pass has used the module yet, and FSDP2 would look for its gathered parameters
        if self.sharded and group.reduce_grads:
            if any(group is ended for ended in self._ended):
                raise self._refusal()
            self._ended.append(group)
            for parameter in group.fsdp_params:
                whole = parameter._unsharded_param
                if whole.grad is None and parameter.unsharded_accumulated_grad is None and whole.requires_grad:
                    whole.grad = torch.zeros_like(whole)
        reduce()

    def _refusal(self) -> ModelError:
        stage = "use zero_optimization.stage 0, and " if self.sharded else ""
        return ModelError(
            f"{self.name or 'the model'} is used several times in one backward pass, and its gradient is complete only "
            f"after the last use; {stage}pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
        )


@contextmanager
def nothing_left_out(uses: Sequence[ModuleUses]) -> Iterator[None]:
    """A context for a forward pass, which must use every sharded module.

    If ranks left out different modules, as with layer drop, FSDP2 would gather and reduce different
    modules together, without an error. Raises ModelError if the pass leaves out a module.
    """
    for use in uses:
        use.is_used = False
    yield
    left_out = [use for use in uses if use.sharded and not use.is_used]
    if left_out and len(left_out) < len(uses):
        raise ModelError(
            f"a forward pass left out {left_out[0].name!r}, but the ranks of a group must gather the same sharded "
            "parameters; run all blocks in each pass, or use zero_optimization.stage 0"
        )


def shard(
    model: nn.Module,
    names: Sequence[str],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshards: bool,
    offload: OffloadPolicy,
    traffic: Traffic,
) -> list[ModuleUses]:
    """Apply FSDP2 to each of the modules ``names`` of ``model``.

    Args:
        names: Paths of the modules. The last path may be "", the model itself.
        mesh: The ranks among which a parameter is divided.
        compute_dtype: The dtype in which parameters are gathered.
        reshards: Whether gathered parameters are freed between forward and backward.
        offload: FSDP2's policy, which says whether shards are in the host's memory.

    Returns:
        A :class:`ModuleUses` for each module.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    settings: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    apply = partial(fully_shard, mesh=mesh, reshard_after_forward=reshards, **settings)
    for name in names:
        for parameter in model.get_submodule(name).parameters():  # FSDP2 needs contiguous parameters
            parameter.data = parameter.data.contiguous()
    uses: list[ModuleUses] = []
    for name in names:
        module = model.get_submodule(name)
        apply(module)
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(CountingAllGather(traffic))
        module.set_custom_reduce_scatter(CountingReduceScatter(traffic))
        uses.append(ModuleUses(module, name, parameter_groups(module), sharded=mesh.size() > 1))
        refuse_hidden_results(module, name)
    return uses
