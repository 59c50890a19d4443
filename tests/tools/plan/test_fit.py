"""``sdp plan --fit``: the layout that it finds, its reasons, and the commands that it suggests."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.config.schema import Config
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.errors import ConfigError
from sdp.engine.placement.profiles import listed_counts
from sdp.launcher.degrees import Degrees
from sdp.tools.cli import main
from sdp.tools.plan import command as plan_module
from sdp.tools.plan import fit as fit_module
from sdp.tools.plan.fit import Choice, find_fit, own_share, stated_step
from sdp.tools.plan.forecast import Forecast, forecast
from sdp.tools.plan.machine import Machine, fill_nodes
from sdp.tools.shared import arguments
from sdp.tools.train import command as train_command

pytestmark = pytest.mark.usefixtures("traced_once")

LLAMA = {
    "name": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "sdp": {"groups": 2, "capacity": 0.5},
    "zero_optimization": {"stage": 3},
    "model": LLAMA,
    "data": {"sequence_length": 32},
}


Planner = Callable[[str, Config, Machine, int], Forecast]


@pytest.fixture(scope="module")
def known() -> dict[str, Forecast]:
    return {}


@pytest.fixture(autouse=True)
def once(known: dict[str, Forecast], monkeypatch: pytest.MonkeyPatch) -> Planner:
    """Every layout is traced once for all tests: that takes a good part of a second."""

    def planner(name: str, config: Config, machine: Machine, world: int) -> Forecast:
        key = f"{world} {machine} {config.resolved()}"
        if key not in known:
            known[key] = forecast(name, config, machine, world)
        return known[key]

    monkeypatch.setattr(fit_module, "forecast", planner)
    monkeypatch.setattr(plan_module, "forecast", planner)
    return planner


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "a run.json"  # a name that a shell would cut
    path.write_text(json.dumps(CONFIG))
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def peak_of(report: dict[str, Any]) -> int:
    return report["plan"]["ranks"][0]["peak"]


def machine(world: int) -> Machine:
    return Machine(fill_nodes((4,) * world, world), 1e12, 0.5, 1e9, 1e8)  # slow links: traffic is not hidden


def all_layouts(config: Config, ranks: int, samples: int, micro: int) -> Iterator[Config]:
    """Every layout of so many ranks per group, none left out."""
    for tp, mode in product((1, 2, 4), ("none", "selective", "full")):
        for stage in (0,) if tp == ranks else (1, 2, 3) if tp < ranks else ():
            yield Choice(ranks, tp, stage, mode, *own_share(samples, micro, 2 * ranks // tp)).applied(config)


def dominates(one: Forecast, other: Forecast) -> bool:
    """With equal degrees less recomputation at no higher stage, or a lower stage with no more."""
    (tp, *mine), (its_tp, *its) = (
        (
            each.config.tensor_parallel.autotp_size,
            each.config.zero_optimization.stage,
            ("none", "selective", "full").index(each.config.activation_checkpointing.mode),
        )
        for each in (one, other)
    )
    return tp == its_tp and mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


@pytest.mark.slow
def test_nothing_of_its_ranks_is_faster_and_no_fewer_fit(once: Planner) -> None:
    """Held to all layouts, at several memories: those of their peaks, so that ever fewer fit."""
    config = load_config(CONFIG)
    step = stated_step(config, 2)
    of_two = [once("", each, machine(4), 4) for each in all_layouts(config, 2, *step)]
    peaks = sorted({plan.worst.trace.peak for plan in of_two})
    of_one = min(once("", each, machine(2), 2).worst.trace.peak for each in all_layouts(config, 1, *step))
    for memory in peaks:
        fit = find_fit(config, memory, machine, 2, bounded=False)
        assert fit.plan.worst.trace.peak <= memory
        assert fit.choice.ranks == (2 if memory < of_one else 1)
        if memory < of_one:
            fitting = [plan for plan in of_two if plan.worst.trace.peak <= memory]
            assert fit.plan.seconds == min(
                plan.seconds for plan in fitting if not any(dominates(other, plan) for other in fitting)
            )
    with pytest.raises(ConfigError, match="no layout of up to 2 ranks per group fits"):
        find_fit(config, peaks[0] - 1, machine, 4, bounded=True)


def test_what_is_learned_stays(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The samples of a step of the stated world, on as few ranks as will do."""
    enough = ["--device-memory", "80GB", "--fit"]
    for words, samples in (
        ([], 2 * 4 * 2),
        (["--set", "train_batch_size=48", "gradient_accumulation_steps=null"], 48),
    ):
        found = planned(capsys, config, *words, *enough)
        assert found["world"] == 2
        assert found["plan"]["batch"] == {"train": samples, "micro": 2, "accumulation": samples // 4}
    assert stated_step(load_config(CONFIG), 16) == (2 * 4 * 16, 2)
    stated = load_config(config, ["tensor_parallel.autotp_size=2"])
    assert stated_step(stated, 16) == (2 * 4 * 8, 2)  # tensor-parallel ranks read the same
    assert stated_step(stated, 2) == (2 * 4 * 2, 2)  # fewer than its grid: of the smallest


def test_samples_are_shared_equally() -> None:
    assert own_share(512, 4, 8) == (4, 16)
    assert own_share(24, 4, 8) == (3, 1)
    assert own_share(24, 4, 4) == (3, 2)  # 4 does not divide 6
    for ranks in (5, 48):
        with pytest.raises(
            ConfigError, match=f"the 24 samples of a step cannot be divided equally among {ranks} data ranks"
        ):
            own_share(24, 4, ranks)


def test_a_smaller_micro_batch_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "images.json"
    model, sdp = {"name": "resnet18", "stem": "cifar", "width": 8}, {"groups": 2, "capacity": 0.5}
    config = {"train_micro_batch_size_per_gpu": 6, "sdp": sdp, "model": model, "data": {"name": "digits"}}
    path.write_text(json.dumps(config))
    needed = peak_of(planned(capsys, path, "--set", "activation_checkpointing.mode=full"))
    report = planned(capsys, path, "--device-memory", f"{needed - 1}B", "--fit")
    assert report["plan"]["batch"] == {"train": 12, "micro": 3, "accumulation": 1}
    assert any(
        "micro-batch 3 instead of 6, so that a step keeps its 12 samples; batch norm" in reason
        for reason in report["reasons"]
    )


def test_every_layout_that_was_tried_is_listed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = peak_of(planned(capsys, config, "--set", "zero_optimization.stage=0", "activation_checkpointing.mode=full"))
    assert main(["plan", str(config), "--device-memory", f"{alone - 1}B", "--fit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tried = [line for line in lines if line.startswith("tried: ")]
    assert tried[0].startswith(
        "tried: 1 rank per group (fsdp 1 × tp 1), ZeRO stage 0, activation checkpointing full: does not fit: the peak "
    )
    assert tried[0].endswith(", 1 B too much")
    (chosen,) = (line for line in lines if line.startswith("chosen: "))
    assert chosen.startswith("chosen: 2 ranks per group (")
    assert {line.partition("(")[2].partition(")")[0] for line in tried[1:]} == {"fsdp 2 × tp 1", "fsdp 1 × tp 2"}
    assert f"tried: {chosen.removeprefix('chosen: ').partition(': ')[0]}: fits: the peak is" in "\n".join(tried)


def test_degrees_that_the_layout_refuses_are_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neuron units allow the degrees of tensor parallelism that divide the groups of neurons.

    Every refused degree is named, whichever is in the configuration.
    """
    neurons = ["--set", "sdp.granularity=neuron", "sdp.neuron_groups=2", "tensor_parallel.autotp_size=2"]
    needed = peak_of(planned(capsys, config, *neurons, "activation_checkpointing.mode=full", "--world", 4))
    report = planned(capsys, config, *neurons, "--device-memory", f"{needed}B", "--fit")
    assert report["plan"]["mesh"]["tp"] in (1, 2)
    assert any("(fsdp 2 × tp 1)" in trial or "(fsdp 1 × tp 1)" in trial for trial in report["tried"])
    assert main(["plan", str(config), *neurons, "--device-memory", "10kB", "--fit"]) == 2
    assert "cannot be cut evenly among tensor_parallel.autotp_size = 4 ranks" in capsys.readouterr().err


def test_tensor_parallel_ranks_stay_inside_a_node(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--device-memory", "10kB", "--fit", "--gpus-per-node", "1"]) == 2
    assert "tensor-parallel ranks would be on two nodes" in capsys.readouterr().err


def test_the_fewest_ranks_that_share_the_samples(once: Planner) -> None:
    """Four ranks per group where two do not fit. One rank a node: tensor parallelism, which would
    need less, is refused.
    """

    def alone(world: int) -> Machine:
        return replace(machine(world), slots=(1,) * world)

    config = load_config(CONFIG, ["train_batch_size=32", "gradient_accumulation_steps=null"])
    least = Choice(4, 1, 3, "full", *own_share(*stated_step(config, 2), 8)).applied(config)
    memory = once("", least, alone(8), 8).worst.trace.peak
    fit = find_fit(config, memory, alone, 2, bounded=False)
    assert fit.choice.ranks == 4
    assert fit.plan.worst.trace.peak <= memory
    assert {trial.choice.ranks for trial in fit.trials} == {1, 2, 4}
    assert fit.plan.batch.train == 32


def test_a_listed_profile_needs_no_capacity() -> None:
    """A layout states all keys, also the capacity that the file leaves out."""
    config = load_config(CONFIG | {"sdp": {"groups": 2, "profile": [1, 2]}})
    assert listed_counts(Choice(1, 1, 2, "full", 1, 1).applied(config).sdp, 2) == [1, 2]


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "message"),
    [
        (9, "1", "null", "--fit: train_batch_size 9 is not a multiple of sdp.groups 2, so no number of ranks "
                         "can divide it equally"),
        (9, "null", "null", "--fit: train_batch_size 9 is not a multiple of sdp.groups 2"),
        (9, "null", "5", "--fit: train_batch_size 9 is not a multiple of sdp.groups 2"),
        (8, "null", "5", "train_batch_size 8 (from the configuration) is not train_micro_batch_size_per_gpu 0 "
                         "(derived) × gradient_accumulation_steps 5 (from the configuration)"),
    ],
)  # fmt: skip
def test_samples_that_no_ranks_share(
    config: Path, capsys: pytest.CaptureFixture[str], train: int, micro: str, accumulation: str, message: str
) -> None:
    stated = [
        f"train_batch_size={train}",
        f"train_micro_batch_size_per_gpu={micro}",
        f"gradient_accumulation_steps={accumulation}",
    ]
    assert main(["plan", str(config), "--set", *stated, "--device-memory", "80GB", "--fit", "--world", "18"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_samples_alone_say_how_many_a_step_has(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """48 samples, of which 20 slots cannot have equal shares: the most ranks that can say what a
    micro-batch is, 8 a group of 20 ÷ 2.
    """
    alone = {
        key: value
        for key, value in CONFIG.items()
        if key not in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    }
    assert stated_step(load_config(alone | {"train_batch_size": 48}), 20) == (48, 3)
    config.write_text(json.dumps(alone | {"train_batch_size": 48}))
    found = planned(capsys, config, "--world", 20, "--device-memory", "80GB", "--fit")
    assert found["plan"]["batch"] == {"train": 48, "micro": 3, "accumulation": 8}


def test_a_stated_degree_of_three_is_tried() -> None:
    three = {
        "model": LLAMA | {"vocab_size": 513, "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 96},
        "tensor_parallel": {"autotp_size": 3},
    }
    with pytest.raises(ConfigError, match=r"no layout of up to 3 ranks .*; closest: 3 ranks per group \(fsdp 1 × "):
        find_fit(
            load_config(CONFIG | three), 3e5, lambda world: replace(machine(world), slots=(world,)), 6, bounded=True
        )


def test_nothing_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--device-memory", "10kB", "--fit", "--world", "4"]) == 2
    error = capsys.readouterr().err
    assert "no layout of up to 2 ranks per group fits 10.00 kB; closest: 2 ranks per group" in error
    assert "the state alone is" in error
    less = error.partition("what would need less memory: ")[2]
    assert less
    for used in ("activation_checkpointing.mode", "zero_optimization.stage 3"):
        assert used not in less


def test_a_hostfile_bounds_what_is_tried(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=6\n")
    search = ["plan", str(config), "--hostfile", str(hosts), "--device-memory", "10kB", "--fit"]
    assert main(search) == 2
    assert "no layout of up to 3 ranks per group fits" in capsys.readouterr().err
    hosts.write_text("a slots=1\n")
    assert main(search) == 2
    assert "--fit: 1 ranks are fewer than sdp.groups 2" in capsys.readouterr().err


# -- the commands that it suggests -----------------------------------------------------------------


def started_by(command: str) -> tuple[int, Forecast]:
    """The ranks that ``sdp train`` would start here, and their plan."""
    program, name, *words = shlex.split(command)
    assert (program, name) == ("sdp", "train")
    parser = arguments.Parser()
    train_command.add_arguments(parser)
    args = parser.parse_args(arguments.split_set_values(words))
    config = load_config(args.config, args.set)
    Degrees(config, args.fsdp).check(args.nproc, "suggested")
    return args.nproc, forecast("", config, machine(args.nproc), args.nproc)


def test_suggested_commands_make_the_same_layout(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        config, "--set", "data.sequence_length=64", 'sdp.placement="random"', "--gpus-per-node", 8,
        "--inter-node", "100Gbit",
    ]  # fmt: skip
    needed = peak_of(planned(capsys, *given))
    report = planned(capsys, *given, "--device-memory", f"{needed // 2}B", "--fit")
    again = shlex.split(report["commands"]["plan"])
    assert again[:2] == ["sdp", "plan"]
    repeated = planned(capsys, *again[2:])
    assert {key: repeated[key] for key in ("world", "machine", "plan")} == {
        key: report[key] for key in ("world", "machine", "plan")
    }
    world, plan = started_by(report["commands"]["train"])
    assert (world, plan.worst.trace.peak) == (report["world"], peak_of(report))
    assert plan.batch.train == report["plan"]["batch"]["train"]
    assert mesh_of(plan.config, world) == plan.layout.mesh


def test_ranks_on_several_nodes_are_the_users_to_start(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "my hosts"
    hosts.write_text("a slots=1\nb slots=6\n")
    report = planned(capsys, config, "--hostfile", hosts, "--device-memory", "80GB", "--fit")
    assert shlex.split(report["commands"]["train"])[:5] == ["sdp", "train", str(config), "--fsdp", "1"]
    assert "--nproc" not in report["commands"]["train"]
    assert peak_of(planned(capsys, *shlex.split(report["commands"]["plan"])[2:])) == peak_of(report)


def test_what_does_not_fit_names_the_search(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--world", "8", "--device-memory", "1MB"]) == 2
    assert "MB of a device; add --fit to find a layout that fits" in capsys.readouterr().err
