"""A pool of rank processes that lives as long as the test session.

Without it, starting processes and importing torch would take most of the time. Ranks are forked
from a server process that has imported the modules they need and runs no other thread.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from .forks.server import fork_context

COLLECTIVE_TIMEOUT = timedelta(seconds=240)  # ranks that share two loaded cores are slow, not stuck
# A process group has threads of gloo until nothing refers to it any more. Such a thread runs 100
# times a second, even without work. A job with three engines has 60 threads when it ends.
MOST_THREADS = 100
START_SECONDS = 300.0  # the server imports torch first, perhaps on busy cores
GRACE_SECONDS = 4.0  # for the other ranks, once one has failed
_VARIABLES: tuple[str, ...] = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    return 0


@contextlib.contextmanager
def rank_alone() -> Iterator[None]:
    """Make a process group of one rank in this process, unless it is in one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class RankError(AssertionError):
    """A function failed or did not finish on one or more ranks."""


class RankPool:
    """Runs functions on ranks 0 … W - 1, each in its own process with a new gloo group.

    Args:
        context: How processes start. If None, the server of forks starts them.
    """

    def __init__(self, context: Any = None) -> None:
        self._context = context or fork_context()
        self._processes: list[Any] = []
        self._connections: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, world: int, timeout: float = 300.0) -> list[Any]:
        """Call ``function(*args)`` on every rank; return the results by rank.

        Args:
            function: A function at module level. The ranks load its module from its file.
            *args: Its arguments, which are pickled.
            world: The number of ranks.
            timeout: Seconds for all ranks to finish.

        Raises:
            RankError: A rank failed or did not finish. The message holds the tracebacks. All
                processes are then killed if one is stuck, and the next ``run`` starts new ones.
        """
        self._start(world)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world):
            job = (inspect.getfile(function), function.__module__, function.__qualname__, args, rank, world, store.port)
            self._connections[rank].send_bytes(pickle.dumps(job))
        try:
            answers = self._collect(world, time.monotonic() + timeout)
        except BaseException:  # also Ctrl-C: no rank may stay in a collective
            self.close()
            raise
        stuck = [rank for rank in range(world) if rank not in answers]
        if stuck:
            for rank in stuck if self._processes else ():  # faulthandler prints where they are
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.2)
            self.close()
        for connection in self._connections[:world]:
            connection.send_bytes(b"all are done")
        failed = {rank: text for rank, (fine, text) in sorted(answers.items()) if not fine}
        if stuck or failed:
            reasons = []
            for text in dict.fromkeys(failed.values()):
                reasons.append(f"ranks {[rank for rank in failed if failed[rank] == text]} of {world} failed:\n{text}")
            if stuck:
                when = "after that" if failed else f"in {timeout:.0f} s"
                reasons.append(f"ranks {stuck} of {world} did not finish {when}; the pool starts new processes")
            raise RankError("\n".join(reasons))
        return [answers[rank][1] for rank in range(world)]

    def _collect(self, world: int, deadline: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        open_ranks = {id(self._connections[rank]): rank for rank in range(world)}
        while len(answers) < world and (left := deadline - time.monotonic()) > 0:
            waiting = [self._connections[rank] for rank in open_ranks.values() if rank not in answers]
            for connection in wait_for(waiting, timeout=left):
                rank = open_ranks[id(connection)]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    answers[rank] = (False, f"the process died (exit code {self._processes[rank].exitcode})")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if any("the process died" in str(text) for fine, text in answers.values() if not fine):
            self.close()
        return answers

    def _start(self, world: int) -> None:
        if any(not process.is_alive() or _threads(process.pid) > MOST_THREADS for process in self._processes):
            self.close()
        started: list[Any] = []
        for rank in range(len(self._processes), world):
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), name=f"rank-{rank}", daemon=True)
            with _environment({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
            started.append(mine)
        deadline = time.monotonic() + START_SECONDS
        for connection in started:
            if not connection.poll(max(0.0, deadline - time.monotonic())) or connection.recv_bytes() != b"ready":
                self.close()
                raise RankError(f"the processes of the ranks did not start in {START_SECONDS:.0f} s")

    def close(self) -> None:
        """Kill the processes; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _serve(connection: Connection) -> None:
    """Read jobs and write answers, both as bytes, until the other end closes the connection."""
    # Linux: die with the server, which dies with the test session, however that ends.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the session kills its ranks
    faulthandler.register(signal.SIGUSR1)
    import torch

    torch.set_num_threads(1)
    _renew_meshes()
    _share_thread()
    torch.set_printoptions(threshold=0, edgeitems=1)  # DeepSpeed makes a text of all weights, also where it prints none
    _caches("torch.distributed.")  # found before they are frozen
    connection.send_bytes(b"ready")
    frozen = 0
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
            if len(sys.modules) > frozen:  # otherwise each collection after a job takes 0.1 s
                gc.collect()
                gc.freeze()
                frozen = len(sys.modules)
            answer = _answer(*job)
            gc.collect()
            connection.send_bytes(answer)
            connection.recv_bytes()  # leave the process group only when all ranks are done with it
        except (EOFError, ConnectionError):
            return
        _leave()


def _load(file: str, name: str) -> Any:
    """Load the module ``name`` from its file: test modules are on no import path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _answer(file: str, module: str, name: str, args: tuple[Any, ...], rank: int, world: int, port: int) -> bytes:
    """Return the pickled result of the function, or the traceback of its error."""
    import torch
    import torch.distributed as dist

    local_rank = 0 if torch.cuda.is_available() else rank  # all ranks share a GPU
    values = map(str, (rank, world, local_rank, world, 0, "127.0.0.1", port))
    with _environment(dict(zip(_VARIABLES, values, strict=True))):
        try:
            store = TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
            if torch.cuda.is_available():
                _send_through_the_host()
            result = getattr(_load(file, module), name)(*args)
            with torch.device("meta"):  # DeepSpeed replaces torch's constructors
                assert torch.empty(1).is_meta, f"{name} leaves torch changed, and the next jobs would fail"
            return pickle.dumps((True, result))
        except BaseException:
            text = traceback.format_exc()
            _leave()  # at once, so that ranks that wait for this one fail too
            return pickle.dumps((False, text))


def _send_through_the_host() -> None:
    """Let gloo send and receive tensors of a GPU, which all ranks of the pool share.

    NCCL needs a GPU for each rank. Of gloo's operations, the collectives take tensors of a GPU, but
    a send would read the GPU's address on the host and end the process. So would the functional
    collective with which a DTensor is gathered.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    send, receive, gather = dist.send, dist.recv, DTensor.full_tensor

    def gather_copy(tensor: Any) -> Any:
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names
        on_host = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=names)
        copy = DTensor.from_local(
            tensor.to_local().detach().cpu(),
            on_host,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        return gather(copy).to(tensor.to_local().device)

    def send_copy(tensor: Any, *args: Any, **kwargs: Any) -> None:
        send(tensor.cpu(), *args, **kwargs)

    def receive_copy(tensor: Any, *args: Any, **kwargs: Any) -> int:
        copy = tensor.cpu()
        source = receive(copy, *args, **kwargs)
        tensor.copy_(copy)
        return source

    if send.__name__ != send_copy.__name__:
        dist.send, dist.recv, DTensor.full_tensor = send_copy, receive_copy, gather_copy


@functools.cache
def _caches(package: str) -> list[Any]:
    """Return the caches of a package's functions, except those of :func:`_renew_meshes`."""
    found = (one for one in gc.get_objects() if type(one) is type(_caches))
    kept = "propagate_op_sharding_non_cached"
    return [one for one in found if one.__module__.startswith(package) and one.__name__ != kept]


def _share_thread() -> None:
    """Let all groups of this rank share one thread of gloo, which runs 100 times a second."""
    from torch.distributed import ProcessGroupGloo

    make, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def made(group: Any, store: Any, rank: int, size: int, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = made  # type: ignore[method-assign]


_MESHES: list[Any] = []  # of this job
_OLD_MESHES: dict[Any, list[Any]] = {}  # of earlier jobs; equal ones together


def _renew_meshes() -> None:
    """When a job makes a mesh, give its groups to equal meshes of earlier jobs.

    What DTensor has found out about an operator is kept with the mesh of the first job that used
    it. To find it out again in each job would take a quarter of the time of all ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh

    make = DeviceMesh.__init__

    def made(mesh: Any, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        for old in (renewed := _OLD_MESHES.pop(mesh, [])):
            old.__dict__ = mesh.__dict__
        _MESHES.extend((mesh, *renewed))

    DeviceMesh.__init__ = made  # type: ignore[method-assign]


def _keep_meshes() -> None:
    for mesh in _MESHES:
        vars(mesh)["_pg_registry"].clear()  # it keeps groups, and these gloo's threads
        _OLD_MESHES.setdefault(mesh, []).append(mesh)
    _MESHES.clear()


def _leave() -> None:
    """Leave the process group, and let go of everything that keeps gloo's threads."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

    if "deepspeed" in sys.modules:
        _leave_deepspeed()
    if dist.is_initialized():
        dist.destroy_process_group()
    _keep_meshes()
    clear_redistribute_planner_cache()
    for cache in _caches("torch.distributed."):
        cache.cache_clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # else the jobs together would reach the limit of compilations of a function


def _leave_deepspeed() -> None:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    # Hooks on autograd's nodes keep an engine, and Python cannot collect such cycles.
    for engine in [one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine)]:
        engine.destroy()
    FWD_MODULE_STACK.clear()
    for cache in _caches("deepspeed."):
        cache.cache_clear()
    # ZeRO 3 compares numbers across ranks that it takes from counters of the process. The ranks of
    # the pool ran different jobs before, so the counters are reset.
    defaults = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    assert defaults is not None
    defaults[0][0] = Init.param_id = 0
    # ZeRO 3 also replaces torch's linear. The next job may use torch alone.
    from sdp.engine.stores.deepspeed.private import restore_linear

    restore_linear()
