"""Process groups between SDP groups, made by hand for each generation, whose waits end at an abort.

A wait in gloo ends only by success, by a broken connection to a direct neighbour, or by a long
timeout. So nothing here blocks in a wait of gloo: it looks whether the operation is done, and
whether the generation is over. Operations of a generation that is over are left behind with their
buffers. A thread drops them when gloo is done with them, because dropping them earlier blocks.

A wait must not raise while another rank of the same SDP group waits in a collective inside the
group, because that rank would wait for ever. So there the error is *deferred*: the wait returns,
and both compute on with worthless values to a point where all ranks of the group look whether the
generation is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .abort import Abort, WaitLimits
from .coordination.errors import StepAbortedError

T = TypeVar("T")

_REAP_SECONDS = 0.1
_ANOTHER_PROCESS = 10**6  # torch's numbers for ranks that are in other default process groups begin here


class _Call:
    """A blocking call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]):
        self._done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

        def work() -> None:
            try:
                self.result = call()
            except BaseException as error:
                self.error = error
            self._done.set()

        threading.Thread(target=work, name="elastic-call", daemon=True).start()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error


def call(action: Callable[[], T], abort: Abort) -> T:
    """Return what ``action`` returns, or leave it behind if the generation is over before."""
    running = _Call(action)
    abort.wait(running.is_completed)
    if running.error is not None:
        abort.fail(running.error)
        raise StepAbortedError(abort.failed) from None
    return running.result


class _Work(dist.Work):
    """An operation that was started, or that could not be started.

    ``finish`` is called when it has succeeded and somebody has waited for it.
    """

    def __init__(self, work: Any, abort: Abort, finish: Callable[[], object] = lambda: None):
        super().__init__()
        self._work, self._abort, self._finish = work, abort, finish

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self, timeout: Any = None) -> bool:
        del timeout  # the generation decides
        self._abort.note()  # an evaluation goes on when the generation has ended
        try:
            self._end()
        except StepAbortedError:
            self._abort.check()
        return True

    def _end(self) -> None:
        if self._work is None:
            raise StepAbortedError
        self._abort.wait(self._work.is_completed)
        try:
            self._work.wait()
        except RuntimeError as error:
            self._abort.fail(error)
            raise StepAbortedError(self._abort.failed) from None
        self._finish()


class AbortableGroup(dist.ProcessGroup):
    """A process group over gloo. torch's functions take it like any other.

    Args:
        backend: the connections to the other members.
        numbers: torch's numbers of the members, for calls that name a member by its number.
        name: a name that no other group of this process has.
        abort: ends the waits.
        longest: gloo's own limit of an operation.
    """

    def __init__(self, backend: Any, numbers: Sequence[int], name: str, abort: Abort, longest: timedelta):
        super().__init__(backend.rank(), backend.size())  # pyright: ignore[reportCallIssue]  # torch's stubs lack it
        self._gloo, self._abort, self._longest = backend, abort, longest
        backend._set_default_timeout(longest)  # of collectives; that of send and recv is given to each wait
        self._started: list[Any] = []
        known = distributed_c10d._world
        known.pg_map[self] = ("gloo", None)  # type: ignore[index]
        known.pg_names[self] = name  # type: ignore[index]
        known.pg_backend_config[self] = "cpu:gloo"  # type: ignore[index]
        known.pg_group_ranks[self] = {number: index for index, number in enumerate(numbers)}  # type: ignore[index]

    def forget(self) -> None:
        """Remove the group from torch's tables."""
        known: Any = distributed_c10d._world
        for table in (known.pg_map, known.pg_names, known.pg_backend_config, known.pg_group_ranks):
            table.pop(self, None)

    def is_idle(self) -> bool:
        """Whether gloo is done with all operations."""
        return all(work.is_completed() for work in self._started)

    def _start(self, operation: Callable[..., Any], args: Any, kwargs: Any, *, blocks: bool = False) -> _Work:
        """Start an operation. A failure is reported by the wait, because backward must go on."""
        self._abort.note()  # so packing the state for a returning group is no pause
        if self._abort.is_over:
            return _Work(None, self._abort)
        try:
            work = operation(*args, **kwargs)
        except RuntimeError as error:
            self._abort.fail(error)
            return _Work(None, self._abort)
        # gloo looks for the end of a send or a receive only while somebody waits for it.
        work = _Call(partial(work.wait, self._longest)) if blocks else work
        self._started = [other for other in self._started if not other.is_completed()] + [work]
        return _Work(work, self._abort)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "gloo"

    def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._start(self._gloo.allreduce, args, kwargs)

    def broadcast(self, tensors: list[torch.Tensor], options: Any, *args: Any, **kwargs: Any) -> dist.Work:
        """Receive into a separate buffer, and copy from it when the caller waits.

        Otherwise one of an ended generation could overwrite a frozen copy after one of the next.
        """
        if options.rootRank == self.rank():
            return self._start(self._gloo.broadcast, (tensors, options, *args), kwargs)
        buffers = [torch.empty_like(tensor) for tensor in tensors]
        work = self._start(self._gloo.broadcast, (buffers, options, *args), kwargs)
        work._finish = lambda: [tensor.copy_(buffer) for tensor, buffer in zip(tensors, buffers, strict=True)]
        return work

    def allgather(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._start(self._gloo.allgather, args, kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._start(self._gloo.gather, args, kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._start(self._gloo.scatter, args, kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._start(self._gloo.barrier, args, kwargs)

    def send(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._start(self._gloo.send, args, kwargs, blocks=True)

    def recv(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._start(self._gloo.recv, args, kwargs, blocks=True)


class Meeting:
    """The process groups of one generation.

    Args:
        store: HOST:PORT of a store that all members reach.
        name: the generation's name.
        rank: this rank's number among the living ones.
        own_number: this rank's number in torch's default process group.
        abort: ends the waits.
        limits: how long to wait for the other members.
        listen: the address at which the other members reach this rank, None for that of
            GLOO_SOCKET_IFNAME.
    """

    def __init__(
        self,
        store: str,
        name: str,
        rank: int,
        own_number: int,
        abort: Abort,
        limits: WaitLimits,
        listen: str | None = None,
    ):
        host, _, port = store.rpartition(":")
        self._name, self._rank, self._own, self._abort = name, rank, own_number, abort
        self._timeout, self._listen = timedelta(seconds=limits.connection), listen
        self._longest = timedelta(seconds=limits.operation)
        self.groups: list[AbortableGroup] = []
        connect = lambda: dist.TCPStore(  # noqa: E731
            host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout
        )
        self._store: Any = call(connect, abort)

    def make_group(self, label: str, ranks: Sequence[int]) -> AbortableGroup:
        """Make a group of this rank and others, which must all call this.

        Args:
            label: a name that is unique in the generation.
            ranks: the numbers of the members among the living ranks, with this rank's.
        """
        name, rank = f"elastic/{self._name}/{label}", ranks.index(self._rank)

        def make() -> Any:
            settings: Any = self._timeout
            if self._listen is not None:
                settings = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # not in stubs
                settings._timeout = self._timeout
                settings._devices = [dist.ProcessGroupGloo.create_device(hostname=self._listen)]
            backend = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, len(ranks), settings)
            backend._set_sequence_number_for_group()
            return backend

        backend = call(make, self._abort)
        # torch looks for its own number in the list when it is asked for this rank's position.
        whole = label == "world"
        numbers = [self._own if whole and other == self._rank else other + whole * _ANOTHER_PROCESS for other in ranks]
        group = AbortableGroup(backend, numbers, name, self._abort, self._longest)
        self.groups.append(group)
        return group

    def leave(self) -> None:
        """Leave all groups behind. A thread drops each when gloo is done with it."""
        groups, self.groups = self.groups, []
        self._store = None
        for group in groups:
            group.forget()
        threading.Thread(target=_drop, args=(groups,), name="elastic-reaper", daemon=True).start()


def _drop(groups: list[AbortableGroup]) -> None:
    while groups:
        with contextlib.suppress(RuntimeError):
            groups[:] = [group for group in groups if not group.is_idle()]
        time.sleep(_REAP_SECONDS)
