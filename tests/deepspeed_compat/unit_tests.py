"""Runs DeepSpeed's own unit tests of training with sdp in DeepSpeed's place.

    python tests/deepspeed_compat/unit_tests.py [--write] CHECKOUT [FILE ...]

CHECKOUT is a directory with DeepSpeed's sources; nothing of them is in this repository. The script
puts a package ``deepspeed`` in front of the installed one. It hands on what sdp offers. Modules
that sdp does not have can be imported: their constants are read from the checkout, and their
classes and functions raise ``NotOffered`` when they are used. ``unit_tests.json`` lists every test
with its verdict, and ``--write`` writes it again. Without FILE, all files of ``FILES`` run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

VERDICTS = Path(__file__).with_name("unit_tests.json")
# The files that have run so far. Others can be named on the command line.
FILES = (
    "checkpoint/test_latest_checkpoint.py",
    "checkpoint/test_other_optimizer.py",
    "launcher/test_ds_arguments.py",
    "runtime/test_ds_config_dict.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_multi_output_model.py",
)
# By a pattern of the error, why a test does not pass. The first one that matches counts.
REASONS = {
    r"NotOffered: (deepspeed\.[\w.]+)": "uses an internal of DeepSpeed",
    r"neither the engine nor the model": "uses an internal of DeepSpeed",
    r"'Config' object has no attribute|ValidationError: 1 validation error for Config": "uses an internal of DeepSpeed",
    r"OutOfScopeError|is not supported|are not supported": "uses a part of DeepSpeed that is out of scope",
    r"ConfigError|ModelError|SDPError": "is refused in one line",
    r"Timeout|timed out|hang": "did not finish in time",
}
ALIAS = '''
import ast, importlib, os, sys, types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
import sdp

CHECKOUT = os.environ["DEEPSPEED_CHECKOUT"]
# The ranks of a test share the CPU, as many as it asks for.
if sdp.get_accelerator().device_name() == "cpu":
    type(sdp.get_accelerator()).device_count = lambda self: 8


def init_distributed(dist_backend=None, init_method=None, rank=-1, world_size=-1, **options):
    """Join the processes of a test, which meet at a file. sdp then uses their process group."""
    import torch.distributed
    torch.distributed.init_process_group(dist_backend, init_method=init_method, rank=rank, world_size=world_size)


class NotOffered(Exception):
    """A test uses something that sdp does not have."""


class _Kind(type):
    def __getattr__(cls, name):
        if name == "NAME":
            return cls.__name__
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.path}.{name}")


def _missing(path):
    def refuse(cls, *_, **__):
        raise NotOffered(path)
    return _Kind(path.rpartition(".")[2], (), {"path": path, "__new__": refuse})


def _constants(name):
    base = os.path.join(CHECKOUT, *name.split("."))
    file = next((each for each in (base + ".py", os.path.join(base, "__init__.py")) if os.path.exists(each)), None)
    found = {}
    for node in ast.parse(open(file).read()).body if file else []:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                pass
    return found


class _All(dict):
    def __getitem__(self, key):
        return True


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("deepspeed.") else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        constants = _constants(spec.name)
        try:
            own = importlib.import_module("sdp" + spec.name[len("deepspeed"):])
        except ImportError:
            own = None

        def get(name):
            if name == "split_params_into_different_moe_groups_for_optimizer":
                return lambda group, *_: [group]  # of a model without experts
            if name == "__compatible_ops__":
                return _All()
            if name.startswith("__"):
                raise AttributeError(name)
            if own is not None and hasattr(own, name):
                return getattr(own, name)
            if name in constants:
                return constants[name]
            return _missing(f"{spec.name}.{name}")

        module.__getattr__ = get
        return module

    def exec_module(self, module):
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)


sys.meta_path.insert(0, Finder())


def __getattr__(name):
    if name.startswith("pytest_"):
        raise AttributeError(name)
    if name.startswith("__") and not name.startswith(("__version", "__git")):
        raise AttributeError(name)
    if hasattr(sdp, name) and not isinstance(getattr(sdp, name), types.ModuleType):
        return getattr(sdp, name)
    try:
        return importlib.import_module("deepspeed." + name)
    except ImportError:
        return _missing("deepspeed." + name)
'''

# The pool of processes hangs if it cannot pickle an error.
PLAIN_ERRORS = """
NAME = "_dist_run"
run_on_a_rank = getattr(DistributedExec, NAME)
def run_with_plain_errors(self, *arguments):
    try:
        return run_on_a_rank(self, *arguments)
    except (Exception, pytest.fail.Exception) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None
run_with_plain_errors.__name__ = NAME  # a method is pickled by its name
setattr(DistributedExec, NAME, run_with_plain_errors)
"""

LISTING = """
import os
def pytest_collection_finish(session):
    with open(os.environ["NAMES"], "w", encoding="utf-8") as names:
        names.writelines(item.nodeid + "\\n" for item in session.items)
"""


def run_tests(checkout: Path, files: list[str], seconds: int) -> Iterator[dict[str, str]]:
    """Run ``files`` of the checkout, one after the other. Yield the results of a file's tests."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "deepspeed"
        package.mkdir()
        (package / "__init__.py").write_text(ALIAS, encoding="utf-8")
        # Not in the checkout, because the tests put the folder above theirs into the search path.
        shutil.copytree(checkout / "tests" / "unit", Path(folder) / "tests" / "unit")
        shutil.copy(checkout / "tests" / "conftest.py", Path(folder) / "tests")
        if (checkout / "tests" / "model").exists():  # some tests read configuration files there
            shutil.copytree(checkout / "tests" / "model", Path(folder) / "tests" / "model")
        with (Path(folder) / "tests" / "unit" / "common.py").open("a", encoding="utf-8") as common:
            common.write(PLAIN_ERRORS)
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
            "DEEPSPEED_CHECKOUT": str(checkout),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        for file in files:
            found: dict[str, str] = {}
            for test in _list_tests(folder, file, own):
                found |= _run_test(Path(folder), test, own, seconds)
                print(test, "  ", found.get(test, ""), flush=True)
            yield found


_OPTIONS = ["-p", "no:xdist", "-p", "no:cacheprovider", "-q"]


def _command(*options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", *_OPTIONS, *options]


def _list_tests(folder: str, file: str, own: dict[str, str]) -> list[str]:
    """Return the names of the tests in ``file``, or the file's name if it cannot be imported."""
    (Path(folder) / "list_tests.py").write_text(LISTING, encoding="utf-8")
    names = Path(folder) / "names"
    names.unlink(missing_ok=True)
    subprocess.run(
        _command("--collect-only", "-p", "list_tests", f"unit/{file}"), cwd=Path(folder) / "tests",
        env=os.environ | own | {"NAMES": str(names)}, capture_output=True, check=False,
    )  # fmt: skip
    listed = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
    return [name.removeprefix("unit/") for name in listed] or [file]


def _run_test(folder: Path, test: str, own: dict[str, str], seconds: int) -> dict[str, str]:
    """Run one test in processes of its own, which are ended after ``seconds``."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    process = subprocess.Popen(
        _command(f"--junitxml={report}", f"unit/{test}"), cwd=folder / "tests",
        env=os.environ | own | {"DS_UNITTEST_TIMEOUT": str(seconds)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):  # the ranks, too
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not report.exists():
        return {test: f"failed: did not finish: {seconds} seconds"}
    return {test: _read(report)}


def _read(report: Path) -> str:
    """Return the result of the only test in pytest's report."""
    result = "failed: differs: the file cannot be imported"
    for case in ElementTree.parse(report).iter("testcase"):  # pytest has just written it
        problems = [(each.tag, each.get("message", "") + "\n" + (each.text or "")) for each in case]
        problem = next((each for each in problems if each[0] in ("failure", "error", "skipped")), None)
        if problem is None:
            result = "passed"
        elif problem[0] == "skipped":
            result = "skipped: " + problem[1].splitlines()[0][:160]
        else:
            result = "failed: " + find_reason(problem[1])
    return result


def find_reason(text: str) -> str:
    """Return the reason of a failure, and the line of the error that shows it.

    pytest marks the lines of errors with an E. The lines of sources around them name other errors.
    """
    marked = [line.strip() for line in text.splitlines() if re.match(r"E\s", line)] or text.splitlines()
    errors = [line.strip() for line in marked if re.search(r"\w*(Error|NotOffered|Exception|Timeout)\b", line)]
    for pattern, reason in REASONS.items():
        for line in errors:
            if re.search(pattern, line):
                return f"{reason}: {re.sub(r'^E +', '', line)[:200]}"
    return "differs: " + (re.sub(r"^E +", "", errors[-1])[:200] if errors else text.strip().splitlines()[0][:200])


def write(results: dict[str, str]) -> None:
    """Replace the verdicts of the files of ``results`` in the list."""
    files = {name.partition("::")[0] for name in results}
    known: dict[str, str] = json.loads(VERDICTS.read_text(encoding="utf-8")) if VERDICTS.exists() else {}
    kept = {name: text for name, text in known.items() if name.partition("::")[0] not in files}
    VERDICTS.write_text(json.dumps(kept | results, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Run the tests and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=[])
    parser.add_argument("--seconds", type=int, default=180, help="the longest time of a test")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, str] = {}
    for results in run_tests(arguments.checkout.resolve(), arguments.files or list(FILES), arguments.seconds):
        found |= results
        if arguments.write:
            write(results)
    for text, count in Counter(": ".join(text.split(": ")[:2]) for text in found.values()).most_common():
        print(f"{count:5} {text}")


if __name__ == "__main__":
    main()
