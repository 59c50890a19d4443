"""Fixtures of all tests: the pool of ranks, and a process group of one rank."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.pathlib import import_path
from sdp.tests.support.ranks import RankPool, rank_alone

# A shell ignores it for its background jobs, and for what those start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A TCPStore looks up the name of each address that connects, and a lost answer costs seconds. With
# no attempts, glibc asks no server, and only /etc/hosts counts.
os.environ["RES_OPTIONS"] = "attempts:0"

# The files that take longest. They come first: a file's tests stay in one of the processes that
# run tests, and others would wait for one that began late.
LONGEST_FILES = (
    "spec/test_copies.py", "engine/optim/test_small_state.py", "spec/test_equality.py", "engine/tracing/test_step.py",
    "engine/subnetwork/test_compile.py", "tools/train/test_service.py", "spec/test_paths.py",
    "tools/test_object_stores.py", "engine/stores/deepspeed/test_equality.py", "engine/test_scripts_of_torch.py",
    "spec/test_local_steps.py", "tools/plan/test_fit.py", "spec/test_loss_weights.py",
    "engine/test_deepspeed_package.py", "engine/stores/deepspeed/test_checkpoint.py", "spec/test_any_module.py",
    "spec/test_repeated_uses.py", "engine/stores/deepspeed/test_features.py", "tools/train/failures/test_failures.py",
    "tools/train/test_train.py", "engine/checkpoint/test_local_steps.py", "engine/checkpoint/test_layouts.py",
    "engine/subnetwork/test_neurons_native.py", "engine/service/test_equality.py",
    "engine/full_model/test_evaluation.py", "engine/test_object_store.py",
)  # fmt: skip


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import a part of the test files first, which rewrites their asserts. Other processes begin
    with other parts. In a new checkout, all of them would rewrite everything.
    """
    worker: Any = getattr(session.config, "workerinput", None)
    if worker is not None:
        files, number = sorted(Path(__file__).parent.rglob("test_*.py")), int(worker["workerid"][2:])
        for file in files[number :: worker["workercount"]]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection imports it again
                root, mode = session.config.rootpath, session.config.getoption("importmode")
                import_path(file, mode=mode, root=root, consider_namespace_packages=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first. Others keep their order."""
    place = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FILES)}
    missing = [str(path) for path in place if not path.is_file()]
    assert not missing, f"LONGEST_FILES in {__file__}: {missing}"
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight processes at most, started when first needed."""
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Fail if a module leaves a process group, in which the next module could plan nothing."""
    yield
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this module leaves a process group: let its tests use the fixture one_rank")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one rank, in this process, until the module's tests are over."""
    with rank_alone():
        yield
