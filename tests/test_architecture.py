"""The architecture: which package may import which, how long a file may be, and who reads
variables.

Every import counts, also those inside functions and under TYPE_CHECKING.
"""

import ast
import configparser
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A folder may import the folders of lower levels only.
LEVELS = {"engine": 0, "data": 1, "models": 1, "launcher": 1, "tools": 2}
# A file of engine/ may import its own package and the packages before it.
ENGINE_ORDER = (
    "errors", "files", "json_files", "module_paths", "model_interface", "environment", "object_store", "config",
    "distributed", "batch", "placement", "optim", "subnetwork", "stores", "sync", "service", "accounting", "full_model",
    "local_steps", "checkpoint", "deepspeed_names", "engine", "check", "construct", "tracing", "initialize",
    "integrations",
)  # fmt: skip
# The same inside tools/. Commands that are not listed are above these and do not import each other.
TOOLS_ORDER = ("shared", "runs", "report", "tasks", "export", "train", "plan")
LAUNCHER_ORDER = (
    "signals", "degrees", "fatal_errors", "restarts", "rank_process", "local", "served", "cluster",
)  # fmt: skip
# Inside engine/stores/. The stores themselves are not listed: they do not import each other.
STORES_ORDER = ("store",)
MOST_LINES, MOST_TEST_LINES, MOST_FILES = 600, 600, 16
IMPORTERS = ("import_module", "__import__")
# Files that import modules by a name that is known at run time, with the modules that they import.
IMPORT_BY_NAME = {
    "tools/cli.py": "the command that was asked for",
    "data/doc_strings.py": "installed packages, whose documentation is a corpus",
    "engine/stores/deepspeed/private.py": "parts of DeepSpeed",
    "engine/deepspeed_names.py": "the monitors' packages",
}
Name = tuple[str, ...]


def sources() -> list[Path]:
    return [path for folder in LEVELS for path in sorted((ROOT / folder).rglob("*.py"))]


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> Name:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def exists(name: Name) -> bool:
    return ROOT.joinpath(*name).is_dir() or ROOT.joinpath(*name).with_suffix(".py").exists()


def imports_of(path: Path) -> Iterator[tuple[Name, str]]:
    """Yield the modules of ``sdp`` that a file imports, and the name that it takes."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path)[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "sdp" or alias.name.startswith("sdp."):
                    yield tuple(alias.name.split(".")[1:]), ""
        elif isinstance(node, ast.ImportFrom):
            below: Name = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base: Name = package[: len(package) - node.level + 1] + below
            elif below[:1] == ("sdp",):
                base = below[1:]
            else:
                continue
            for alias in node.names:
                module = (*base, alias.name)
                yield (module, "") if exists(module) else (base, alias.name)


def edges() -> set[tuple[Name, Name]]:
    return {
        (name_of(path), target)
        for path in sources()
        for target, _ in imports_of(path)
        if target and target[0] in LEVELS and target != name_of(path)
    }


def forbidden_imports(path: Path) -> Iterator[str]:
    """Yield the imports of a file that would get around the order of the packages."""
    for target, name in imports_of(path):
        if not target:
            yield f"the root package{f', for {name}' if name else ''}; import the module that defines the name"
        elif target[0] not in LEVELS:
            yield f"{dotted([target])}, which is not a part of the program"
        elif target[:2] == ("tools", "cli"):
            yield "tools.cli, which stands above all commands"
        elif len(target) == 1 and name:
            yield f"{name} from the folder {target[0]}; import the module that defines the name"
    importers = [
        n for n in ast.walk(parse(path)) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(IMPORTERS)
    ]
    for call in importers if path.relative_to(ROOT).as_posix() not in IMPORT_BY_NAME else []:
        argument = call.args[0] if call.args else None
        if not isinstance(argument, ast.Constant) or str(argument.value).startswith(("sdp", ".")):
            yield f"line {call.lineno}: a module by a name that this test cannot read"


def is_one_of(node: ast.AST, names: Name) -> bool:
    """Whether a node is one of these dotted names. To unparse every attribute would take longer."""
    ends_like_one = isinstance(node, ast.Attribute) and any(name.endswith(node.attr) for name in names)
    return ends_like_one and ast.unparse(node) in names


def points_down(source: Name, target: Name) -> bool:
    """Whether the order of the packages allows this import."""
    if source[0] != target[0]:
        return LEVELS[source[0]] > LEVELS[target[0]]
    if len(source) < 2:  # a folder's __init__.py
        return source[0] in ("data", "models")  # the others import nothing, so that the launcher does without torch
    if source[:2] == target[:2] == ("engine", "stores") and len(source) > 2 and source[2] != target[2]:
        return is_before(target[2], source[2], STORES_ORDER)
    if len(target) < 2 or source[1] == target[1]:
        return True
    orders = {"engine": ENGINE_ORDER, "launcher": LAUNCHER_ORDER, "tools": TOOLS_ORDER}
    return is_before(target[1], source[1], orders[source[0]]) if source[0] in orders else True


def is_before(target: str, source: str, order: tuple[str, ...]) -> bool:
    """Whether ``target`` is before ``source``. All listed ones are before others."""
    return target in order[: order.index(source)] if source in order else target in order


def cycle_through(start: Name, reached: dict[Name, set[Name]]) -> list[Name]:
    """Return the shortest way from a module back to itself, or nothing."""
    ways = [[start]]
    seen: set[Name] = set()
    for way in ways:
        for target in reached.get(way[-1], ()):
            if target == start:
                return [*way, start]
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return []


def dotted(names: tuple[Name, ...] | list[Name]) -> str:
    return " -> ".join(".".join(name) for name in names)


def test_no_import_gets_around_the_order() -> None:
    """Nothing imports the root package, the tests or the command line."""
    found = [f"{path.relative_to(ROOT)}: imports {what}" for path in sources() for what in forbidden_imports(path)]
    assert not found, "\n".join(found)


def test_nothing_imports_the_laboratory() -> None:
    """lab/ is not installed."""
    pattern = re.compile(r"^\s*(?:from|import) (?:sdp\.)?lab\b", re.MULTILINE)
    importers = [path for path in [*sources(), *files_of_tests()] if pattern.search(path.read_text(encoding="utf-8"))]
    assert not importers


@pytest.mark.parametrize(("name", "order"), [("engine", ENGINE_ORDER), ("launcher", LAUNCHER_ORDER)])
def test_every_package_is_in_the_order(name: str, order: tuple[str, ...]) -> None:
    folder = ROOT / name
    there = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    unknown, gone = there - {"__init__", *order}, set(order) - there
    assert not unknown, f"add {sorted(unknown)} to the order of {name}, above all that they import"
    assert not gone, f"remove {sorted(gone)} from the order of {name}"


def test_imports_point_down() -> None:
    upward = sorted(dotted(edge) for edge in edges() if not points_down(*edge))
    assert not upward, "move what is needed to the lower package, or pass it as an argument:\n" + "\n".join(upward)


def test_no_two_files_and_no_two_folders_import_each_other() -> None:
    """The files directly in engine/ are not one folder here: ENGINE_ORDER lists them one by one."""
    folders = {path.parent for path in sources()}
    files, above = (defaultdict[Name, set[Name]](set) for _ in range(2))
    for edge in edges():
        files[edge[0]].add(edge[1])
        a, b = (name if ROOT.joinpath(*name) in folders else name[:-1] for name in edge)
        if a != b and ("engine",) not in (a, b):
            above[a].add(b)
    for reached in (files, above):
        cycles = {frozenset(way): dotted(way) for start in sorted(reached) if (way := cycle_through(start, reached))}
        assert not cycles, "move what both need to a third file, below them:\n" + "\n".join(cycles.values())


def test_importing_the_package_does_not_import_torch() -> None:
    """A name whose module needs torch imports it, which is forbidden here to save time."""
    code = "import sys, sdp; print('torch' in sys.modules); sys.modules['torch'] = None; sdp.SDPEngine"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "False\n"), done.stderr
    assert "ModuleNotFoundError: import of torch halted" in done.stderr


def test_the_command_line_imports_a_command_only_when_it_runs() -> None:
    static = ast.Module(
        [node for node in parse(ROOT / "tools/cli.py").body if isinstance(node, ast.Import | ast.ImportFrom)], []
    )
    modules = [node.module or "" for node in ast.walk(static) if isinstance(node, ast.ImportFrom) and node.level == 1]
    commands = [module for module in modules if module.partition(".")[0] not in TOOLS_ORDER[:2]]
    assert not commands, f"tools/cli.py must import these when they are called, not at the top: {commands}"


@pytest.mark.parametrize("folder", [*LEVELS, "tests"])
def test_files_are_short(folder: str) -> None:
    most = MOST_TEST_LINES if folder == "tests" else MOST_LINES
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted((ROOT / folder).rglob("*.py"))}
    long = [f"{path.relative_to(ROOT)}: {count}" for path, count in lines.items() if count > most]
    assert not long, f"split by subject what has more than {most} lines:\n" + "\n".join(long)


def test_folders_are_small() -> None:
    count: dict[Path, int] = {}
    for path in [*sources(), *files_of_tests()]:
        count[path.parent] = count.get(path.parent, 0) + (path.name != "__init__.py")
    full = [f"{folder.relative_to(ROOT)}: {files}" for folder, files in count.items() if files > MOST_FILES]
    assert not full, f"make a package of a part of what has more than {MOST_FILES} files:\n" + "\n".join(full)


def test_every_package_says_what_it_is() -> None:
    wrong = []
    for folder in sorted({path.parent for path in sources()}):
        file = folder / "__init__.py"
        if not file.exists() or not ast.get_docstring(parse(file)):
            wrong.append(f"{folder.relative_to(ROOT)}: add an __init__.py with one docstring")
            continue
        for node in parse(file).body[1:]:
            exported = isinstance(node, ast.Assign) and dotted_targets(node) == ["__all__"]
            if not isinstance(node, ast.ImportFrom) and not exported:
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: move this code to a module")
    assert not wrong, "\n".join(wrong)


def dotted_targets(node: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in node.targets]


def test_only_the_environment_reads_variables() -> None:
    readers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if path.parent != ROOT / "engine/environment"
        for node in ast.walk(parse(path))
        if is_one_of(node, ("os.environ", "os.getenv"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {alias.name for alias in node.names} & {"environ", "getenv"}
        )
    ]
    assert not readers, "use a function of engine/environment/ instead of os.environ:\n" + "\n".join(readers)


# Files that may parse JSON themselves, and why. All other JSON goes through engine/json_files.py.
OWN_JSON = {
    "engine/json_files.py": "it sets the limits",
    "engine/distributed/agreement.py": "ranks of one run send each other values that they made themselves",
    "data/sources.py": "a line may be as long as --max-document-bytes allows, and other columns may hold any text",
}


def test_json_is_read_within_limits() -> None:
    readers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if str(path.relative_to(ROOT)) not in OWN_JSON
        for node in ast.walk(parse(path))
        if is_one_of(node, ("json.load", "json.loads", "json.JSONDecoder"))
        or (isinstance(node, ast.ImportFrom) and node.module == "json")
    ]
    assert not readers, "use parse_json or read_json_file of engine/json_files.py:\n" + "\n".join(readers)


# torch's collectives that pickle what they send.
PICKLES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip


def unpickles(path: Path) -> Iterator[str]:
    """Yield what a file does that could run the code in a pickle, with its line."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and node.attr in PICKLES:
            yield f"{node.lineno}: {node.attr}"
        elif is_one_of(node, ("pickle.load", "pickle.loads", "pickle.Unpickler")):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module == "pickle":
            yield f"{node.lineno}: from pickle import"
        elif isinstance(node, ast.Call) and is_one_of(node.func, ("torch.load",)):
            is_safe = "weights_only=True" in ast.unparse(node)
            if not is_safe:
                yield f"{node.lineno}: torch.load without weights_only=True"


def test_nothing_is_unpickled() -> None:
    found = [f"{path.relative_to(ROOT)}:{what}" for path in sources() for what in unpickles(path)]
    assert not found, "send JSON (gather_json) or tensors, and read no pickle:\n" + "\n".join(found)


def test_every_package_is_installed() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = set(setup["options"]["packages"].split()) - {"sdp", "sdp.configs"}
    there = {".".join(("sdp", *name_of(path))) for path in sources() if path.name == "__init__.py"}
    assert listed == there, f"setup.cfg's packages: add {sorted(there - listed)} and remove {sorted(listed - there)}"


# Private names that tests may reach, and whose they are. Those of SDP are not among them.
FOREIGN_PRIVATE_NAMES = {
    "_dynamo": "torch",
    **dict.fromkeys(("_Options", "_devices", "_timeout"), "ProcessGroupGloo of torch"),
    "_reset_state": "AcceleratorState of accelerate",
    "_local_scalar_dense": "torch.ops.aten",
    "_world": "torch.distributed.distributed_c10d",
    "_param_fqn": "FSDPParam of torch",
    "_unsharded_param": "FSDPParam of torch",
    "_str": "pathlib.Path",
    "_exit": "os",
    "_clear": "atexit",
    "_run_exitfuncs": "atexit",
    "_shutdown": "threading",
    "_zero3_consolidated_16bit_state_dict": "DeepSpeedEngine, so users call it on SDP's engine too",
    "_register_deepspeed_module": "DeepSpeedZeRoOffload",
    "_attn_implementation": "the configurations of transformers",
    "_option_string_actions": "argparse.ArgumentParser",
}
PRIVATE = re.compile(r"_[^_]")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a test imports from ``sdp``, or reaches in an object, each with
    its line.

    Strings of several lines that are Python code are scripts that a test runs, and count too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sdp":
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if PRIVATE.match(alias.name))
        elif isinstance(node, ast.Attribute) and PRIVATE.match(node.attr) and node.attr not in FOREIGN_PRIVATE_NAMES:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "setattr", "delattr")):
            names = (word.value for word in node.args[1:2] if isinstance(word, ast.Constant))
            yield from (
                f"{node.lineno}: {name!r}"
                for name in map(str, names)
                if PRIVATE.match(name) and name not in FOREIGN_PRIVATE_NAMES
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") > 1:
            try:
                script = ast.parse(node.value)
            except (SyntaxError, ValueError):
                continue
            yield from (f"{node.lineno}, in a script at its line {found}" for found in private_names(script))


def test_tests_use_public_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{name}"
        for path in files_of_tests()
        for name in private_names(parse(path))
        if path != Path(__file__)
    ]
    assert not found, "test through the public interface, or make these names public:\n" + "\n".join(found)
