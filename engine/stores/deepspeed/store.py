"""The DeepSpeed store: DeepSpeed trains a group's subnetwork with ZeRO stage 1, 2 or 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...batch.call import Redirected
from ...config.schema import Config
from ...distributed.collectives import Traffic, outside_inference_mode, stored_tensor
from ...distributed.process_groups import Communicators
from ...errors import ModelError
from ...optim.script_optimizers import refuse_outside_engine, shortened, stepped_by_engine
from ...placement.layout import Layout
from ...placement.placement import Bucket
from ..store import Averages, DeviceMessages, Piece, RankContext, Stepped, parameters_of
from .checks import PendingGradients, UsedParameters, check_partitions
from .partitions import Bundle, pieces_of, untrained
from .private import Zero, logged_all_reduce, logged_broadcast, whole_float32


class DeepSpeedStore:
    """A :class:`~sdp.engine.stores.store.GroupStore` whose state DeepSpeed's ZeRO shards.

    DeepSpeed reduces gradients inside the group, steps, and gathers the new weights. The optimizer
    steps on this rank's float32 partitions. A *bundle* is a set of parameters in one partition.

    Args:
        engine: DeepSpeed's engine for the ranks of the group. Its model is the group's subnetwork.
        optimizer: torch's optimizer, with one parameter group for each bundle that the group holds.
        bundles: the bundles of the full model.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: Optimizer,
        layout: Layout,
        bundles: Sequence[Bundle],
        config: Config,
        device: torch.device,
        communicators: Communicators,
    ):
        mesh, stage, rank = layout.mesh, config.zero_optimization.stage, dist.get_rank()
        at = mesh.coordinates(rank)
        self.deepspeed, self.optimizer, self.layout = engine, optimizer, layout
        self.module: nn.Module = engine.module
        self.bundles = [bundle for bundle in bundles if at.sdp in bundle.holders]
        self.context = RankContext(
            rank,
            at,
            mesh,
            device,
            stage,
            getattr(torch, config.precision),
            communicators,
            Traffic(),
            # Averages begin when the backward pass has ended, in the order of backward.
            buckets=[Bucket(bundle.holders, (bundle.key,)) for bundle in reversed(bundles)],
            messages=LoggedMessages(device),
            awaits_blocks=stage < 3,  # ZeRO 3 gathers weights before the block that needs them runs
            user_groups=[bundle.options for bundle in self.bundles],
            user_group_count=1 + max(bundle.options for bundle in bundles),
            shard_of_copy=self._shard_of_copy,
            passes_together=1 if stage == 3 else None,  # ZeRO 3 follows the modules of one pass at a time
        )
        everything, infos = parameters_of(self.module, layout, at.sdp), layout.parameters
        self.parameters = {name: p for name, p in everything.items() if name in infos and at.sdp in infos[name].holders}
        self._zero = Zero(engine.optimizer, optimizer, stage, offloads=config.zero_optimization.offloads)
        check_partitions(self.bundles, self._zero.masters, self.parameters, stage=stage, ranks=mesh.fsdp)
        self._usage = UsedParameters(
            {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad},
            group=at.sdp,
            rank_inside=at.fsdp,
            ranks_inside=mesh.fsdp,
            must_stay_equal=config.zero_optimization.offloads,
        )
        self._pending = PendingGradients(self.module)
        self._optimized = {name for bundle in self.bundles for name in bundle.names}
        self._stepped: dict[str, Stepped] | None = None
        self._frozen = {name: p for name, p in self.parameters.items() if not p.requires_grad}
        for key in self.stepped:
            self._clear_padding(key)
        optimizer.register_step_pre_hook(lambda optimizer, *_: refuse_outside_engine(optimizer))
        self._note_weights()

    @property
    def stepped(self) -> Mapping[str, Stepped]:
        if self._stepped is not None:
            return self._stepped
        found = {
            bundle.key: Stepped(master, bundle.unit, bundle.holders, bundle.names, index)
            for index, (bundle, master) in enumerate(zip(self.bundles, self._zero.masters, strict=True))
        }
        for name in (name for name in self.parameters if name not in self._optimized):  # in the order of all holders
            info = self.layout.parameters[name]
            tensor = stored_tensor(self.parameters[name]).detach()
            found[name] = Stepped(tensor, info.unit, info.holders, (name,), None)
        self._stepped = found
        return found

    @torch.no_grad()
    def _clear_padding(self, key: str) -> None:
        """Make padding 0. ZeRO 3 leaves it undefined, and holders are compared with it."""
        tensor = self.stepped[key].tensor
        is_padding = torch.ones_like(tensor, dtype=torch.bool)
        for piece in self.pieces(key, is_padding):
            piece.tensor.fill_(False)
        if is_padding.any():
            tensor.masked_fill_(is_padding, 0)

    # -- steps -------------------------------------------------------------------------------------

    def forward(self, call: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if unfrozen and torch.is_grad_enabled():
            raise ModelError(
                f"{shortened(unfrozen)}: these parameters were frozen in sdp.initialize, and the script unfroze them "
                "later; DeepSpeed's ZeRO has no partitions for them, so their values cannot change; unfreeze them "
                "before sdp.initialize"
            )
        with outside_inference_mode():
            return call(Redirected(self.module, self.deepspeed.__call__), batch)

    def backward(self, loss: torch.Tensor, averages: Averages | None) -> None:
        self._refuse_changed_weights()
        self.deepspeed.set_gradient_accumulation_boundary(averages is not None)
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        self._usage.end_micro_batch()
        if averages is None:
            self.deepspeed.step()  # it only counts
            return
        differences = torch.tensor(self._usage.differences(), dtype=torch.float64, device=self.context.device)
        wait = self.context.start_control(differences)
        self._zero.take_gradients()
        averages.arm()
        averages.finish()
        wait()
        self._usage.check(differences.tolist())
        self._pending.exist = True

    def step(self) -> None:
        self._pending.exist = False
        self._zero.give_gradients()
        with stepped_by_engine(self.optimizer):
            self.deepspeed.step()

    def zero_grad(self) -> None:
        self._pending.exist = False
        self._zero.drop_gradients()
        self._usage.start_step()

    def reshard(self) -> None:
        """Do nothing, because DeepSpeed gathers and frees weights by itself."""

    # -- the full model, and the state -------------------------------------------------------------

    @contextmanager
    def evaluating(self, *, full_model: bool) -> Iterator[Callable[[], None]]:
        with outside_inference_mode(), torch.no_grad():
            yield lambda: None

    def local_weight(self, name: str) -> torch.Tensor:
        parameter, context = self.parameters[name], self.context
        if name in self._optimized:
            return whole_float32(parameter)
        whole = stored_tensor(parameter).detach()
        if context.communicators.fsdp is not None and context.stage == 3:
            parts = whole.new_empty((context.mesh.fsdp, whole.numel()))
            dist.all_gather(list(parts.unbind()), whole, group=context.communicators.fsdp)
            whole = parts
        info = self.layout.parameters[name]
        return whole.float().view(-1)[: info.numel].view(info.shape)

    def pieces(self, key: str, tensor: torch.Tensor) -> Iterable[Piece]:
        one, context = self.stepped[key], self.context
        is_whole = one.group is None and context.stage < 3
        bundle = untrained(self.layout, key) if one.group is None else self.bundles[one.group]
        ranks, rank = (1, 0) if is_whole else (context.mesh.fsdp, context.at.fsdp)
        stage = 3 if one.group is None else context.stage  # a bundle of one parameter, without padding to ALIGNMENT
        return pieces_of(bundle, tensor.view(-1), self.layout, stage=stage, ranks=ranks, rank=rank)

    def weights_changed(self) -> None:
        if self.context.stage == 3:
            self.deepspeed.empty_partition_cache()  # weights that are gathered would stay
            for one in (one for one in self.stepped.values() if one.group is not None):
                stored = [stored_tensor(self.parameters[name]).detach() for name in one.names]
                parts = one.tensor.detach().split([tensor.numel() for tensor in stored])
                for tensor, part in zip(stored, parts, strict=True):
                    tensor.copy_(part)
        else:
            self._zero.update_model()
        self._note_weights()

    def enter_phase(self, layout: Layout) -> None:
        raise NotImplementedError  # the configuration allows one masking only

    def _shard_of_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        context = self.context
        if context.stage < 3:
            return tensor
        flat, size = tensor.reshape(-1), -(-tensor.numel() // context.mesh.fsdp)
        flat = nn.functional.pad(flat, (0, size * context.mesh.fsdp - flat.numel()))
        return flat.split(size)[context.at.fsdp].contiguous()

    def _note_weights(self) -> None:
        self._versions = {name: parameter._version for name, parameter in self.parameters.items()}

    def _refuse_changed_weights(self) -> None:
        """Raise ModelError if the script has changed the model's weights, which ZeRO would undo."""
        parameters = self.parameters
        changed = next((name for name, then in self._versions.items() if parameters[name]._version != then), "")
        if changed:
            raise ModelError(
                f"the script changed the weights of {changed} after sdp.initialize, but DeepSpeed's ZeRO steps on "
                "its float32 copies, so the next step would undo the change; change the weights before "
                "sdp.initialize, "
                'call engine.load_checkpoint, or use sdp.engine "fsdp2"'
            )


class LoggedMessages(DeviceMessages):
    """Starts collectives between groups so that DeepSpeed's communication logger counts them."""

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return self.send(tensor, lambda sent: logged_all_reduce(sent, group))

    def broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
        return self.send(tensor, lambda sent: logged_broadcast(sent, source, group))
