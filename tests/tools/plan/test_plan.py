"""``sdp plan``: figures as JSON and as a table, next to those of the dense model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.accounting.quantities import format_bytes
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.errors import ConfigError
from sdp.tests.support.foreign.given_models import add_tokenizer, make
from sdp.tools.cli import main
from sdp.tools.plan.machine import Machine, fill_nodes
from sdp.tools.plan.ways import compare, dense_ways
from sdp.tools.shared.quantities import quantity

pytestmark = pytest.mark.usefixtures("traced_once")

CONFIGS = Path(__file__).parents[3] / "configs"
LLAMA = {
    "name": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "sdp": {"groups": 2, "capacity": 0.5},
    "zero_optimization": {"stage": 3},
    "model": LLAMA,
    "data": {"sequence_length": 32},
}
EMBEDDINGS, LAYER = 2 * 512 * 64 + 64, 4 * 64 * 64 + 3 * 64 * 160 + 2 * 64  # parameters


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(CONFIG))
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_states_are_those_of_the_layout(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, config, "--world", 8, "--gpus-per-node", 4)
    assert report["parameters"] == EMBEDDINGS + 2 * LAYER
    assert report["plan"]["mesh"] == {"sdp": 2, "fsdp": 4, "tp": 1}
    ways, _ = compare(load_config(CONFIG), Machine((4, 4), 1e15, 0.4, 1e11, 1e10), 8)
    plans = {"plan": report["plan"], **{way.name: way.to_json() for way in ways}}
    whole = EMBEDDINGS + 2 * LAYER
    for name, held, shards in (
        ("plan", EMBEDDINGS + LAYER, 4), ("DDP", whole, 1), ("FSDP (ZeRO-3)", whole, 8), ("HSDP", whole, 4),
    ):  # fmt: skip
        facts = plans[name]
        rank = facts["ranks"][0]
        assert rank["parameters"] == rank["gradients"] == 4 * held // shards, name
        assert rank["optimizer"] == 2 * rank["parameters"]
        assert rank["peak"] == sum(rank["at_peak"].values())
        assert rank["peak"] > rank["parameters"] + rank["optimizer"]
        assert facts["step_seconds"] >= max(rank["seconds"]["compute"], rank["seconds"]["inside"])
    rank = plans["DDP"]["ranks"][0]  # its buckets hold all gradients while activations are at their most
    assert rank["peak"] == rank["parameters"] + rank["gradients"] + rank["optimizer"] + rank["at_peak"]["activations"]
    assert rank["activations"] >= rank["at_peak"]["activations"]


def test_a_gpu_keeps_less_for_backward(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its norms keep no copies; all else of the plan is the same, and what a plan suggests is of
    the same device.
    """
    reports = {device: planned(capsys, config, "--world", 4, "--device", device) for device in ("cpu", "cuda")}
    for device, report in reports.items():
        assert report["machine"]["device"] == device
        assert main(["plan", str(config), "--device", device]) == 0
        assert f"the operators of a {'GPU' if device == 'cuda' else 'CPU'} (for" in capsys.readouterr().out
    on_cpu, on_cuda = reports["cpu"]["plan"], reports["cuda"]["plan"]
    cpu, cuda = on_cpu["ranks"][0], on_cuda["ranks"][0]
    assert cuda["peak"] < cpu["peak"]
    assert cuda["activations"] < cpu["activations"]
    assert on_cuda["step_seconds"] == on_cpu["step_seconds"]
    assert all(cuda[kind] == cpu[kind] for kind in ("parameters", "gradients", "optimizer", "flops", "sent"))
    fitted = planned(capsys, config, "--device", "cuda", "--device-memory", "1GB", "--fit")
    assert "--device cuda" in fitted["commands"]["plan"]
    assert planned(capsys, config)["machine"]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_bytes_are_told_apart_by_link(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups of four ranks on two nodes: shards stay inside, gradients cross."""
    shard = 4 * (EMBEDDINGS + LAYER) // 4
    report = planned(capsys, config, "--world", 8, "--gpus-per-node", 4)
    rank = report["plan"]["ranks"][0]
    shared = 4 * EMBEDDINGS // 4  # every unit has one holder
    assert rank["sent"]["between nodes"] == shared + 2 * 16 * 7 / 8
    assert (
        rank["sent"]["inside a node"] == 3 * shard * 3
    )  # two gathers and a reduce-scatter, three quarters of four shards each
    assert report["other_phases"] == {}


def test_the_hostfile_says_how_many_ranks_and_which_are_together(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=6\n")
    report = planned(capsys, config, "--hostfile", hosts)
    assert report["world"] == 8
    assert report["machine"]["slots"] == [2, 6]
    links = {
        one["kind"]: one["link"] for one in report["plan"]["ranks"][0]["collectives"] if one["scope"] == "inside groups"
    }
    assert links == {"all_gather": "between nodes", "reduce_scatter": "between nodes"}


def test_hosts_without_ranks_do_not_count(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks fill the hosts in their order: of four hosts eight ranks take two, and HSDP's groups
    are these; four take one.
    """
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{name} slots=4\n" for name in "abcd"))
    for world, slots, expected in ((4, [4], ["HSDP: on one node it is FSDP"]), (8, [4, 4], [])):
        assert planned(capsys, config, "--hostfile", hosts, "--world", world)["machine"]["slots"] == slots
        ways, notes = dense_ways(load_config(CONFIG), Machine(tuple(slots), 1e15, 0.4, 1e11, 1e10), world)
        assert (notes, "HSDP" in ways) == (expected, not expected)
    assert (mesh_of(ways["HSDP"], world).sdp, mesh_of(ways["HSDP"], world).fsdp) == (2, 4)


def test_it_fits_or_it_does_not(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--device-memory", "80GB"]) == 0
    assert "of a device's 80.00 GB are left" in capsys.readouterr().out
    assert main(["plan", str(config), "--device-memory", "1MB"]) == 2
    printed = capsys.readouterr()
    assert "expected time of a step" in printed.out
    assert "does not fit: the peak of rank 0 is" in printed.err
    assert "MB more than the 1.00 MB of a device" in printed.err
    assert "iB" not in printed.out  # one unit everywhere: that of --device-memory


def test_images_and_units_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "images.json"
    model = {"name": "resnet18", "stem": "cifar", "width": 8}
    path.write_text(json.dumps({"sdp": {"groups": 2, "capacity": 0.5}, "model": model, "data": {"name": "digits"}}))
    assert main(["plan", str(path), "--set", "train_micro_batch_size_per_gpu=4"]) == 0
    printed = capsys.readouterr().out
    assert "images/s" in printed
    assert "Groups differ; peaks: rank" in printed
    assert "warning: a group holds" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world", "3"], "world size 3 is not divisible by sdp.groups 2"),
        (["--world", "0"], "--world: '0' is not a positive whole number"),
        (["--device-memory", "eighty"], "--device-memory eighty: expected a number with a unit, such as 80GB"),
        (["--device-memory", "80"], "--device-memory 80: expected a number with a unit, such as 80GB"),
        (["--device-memory", ""], "--device-memory '': expected a number with a unit, such as 80GB"),
        (["--inter-node", "100"], "--inter-node 100: expected a number with a unit, such as 50GB/s or 400Gbit"),
        (["--achieved", "1.5"], "--achieved 1.5: expected a fraction"),
        (["--set", "sdp.units=[]"], "sdp.units: with [] there is no unit to place"),
        (
            ["--set", "train_batch_size=1", "gradient_accumulation_steps=1"],
            "train_batch_size 1 (from the configuration) is not",
        ),
        (["--set", "model={}"], "model: this section is required to plan"),
        (["--set", "data.sequence_length=4096"], "max_position_embeddings"),
    ],
)
def test_mistakes(config: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plan", str(config), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_quantities() -> None:
    assert quantity("80GB", "B", "-") == quantity("80G", "B", "-") == 80e9
    assert quantity("80GiB", "B", "-") == 80 * 2**30
    assert quantity("989TFLOP/s", "FLOP/s", "-") == 989e12
    assert quantity("1.5e3B/s", "B/s", "-") == 1500
    assert (
        quantity("100Gbit", "B/s", "-")
        == quantity("100 gbit/s", "B/s", "-")
        == quantity("12.5GB/s", "B/s", "-")
        == 12.5e9
    )
    for wrong in ("80gb", "0GB", "-1GB", "GB", "80GBB", "80", "", "1.5e3", "80Gbit", "1e999GB"):
        with pytest.raises(ConfigError, match="expected"):
            quantity(wrong, "B", "-")
    for wrong in ("100", "100Gb/s", "0Gbit", "Gbit"):
        with pytest.raises(ConfigError, match="expected"):
            quantity(wrong, "B/s", "-")


def test_bytes_in_decimal_units() -> None:
    assert [format_bytes(nbytes) for nbytes in (0, 999, 1000, 40e6, 999.99e6, 80e9, 2e12)] == [
        "0 B", "999 B", "1.00 kB", "40.00 MB", "999.99 MB", "80.00 GB", "2.00 TB"]  # fmt: skip


def test_links() -> None:
    machine = Machine(fill_nodes((4,) * 3, 10), 1, 1, 1, 1)
    assert machine.slots == (4, 4, 2)
    assert machine.link((0, 3)) == machine.link((8, 9)) == "inside a node"
    assert machine.link((3, 4)) == machine.link((0, 9)) == "between nodes"


def test_slots_are_filled_in_their_order() -> None:
    assert fill_nodes((3, 6, 2), 11) == (3, 6, 2)
    assert fill_nodes((3, 6, 2), 9) == (3, 6)
    assert fill_nodes((3, 6, 2), 5) == (3, 2)
    assert fill_nodes((3, 6, 2), 2) == (2,)


@pytest.mark.parametrize(("slots", "tp"), [((1,) * 8, 1), ((4, 4), 4)])
def test_hsdp_that_shards_nothing_is_left_out(slots: tuple[int, ...], tp: int) -> None:
    config = load_config(CONFIG, [f"tensor_parallel.autotp_size={tp}"])
    ways, notes = dense_ways(config, Machine(slots, 1e15, 0.4, 1e11, 1e10), 8)
    assert list(ways) == ["DDP", "FSDP (ZeRO-3)", "ZeRO-2"]
    assert notes == ["HSDP: no two ranks of a node could share the state, so it is DDP"]


@pytest.mark.slow
def test_seventy_billion_parameters_on_512_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures that follow from the sizes alone: LLaMA-3's parameters, a half of its layers in a
    group of 16 × 8 ranks.
    """
    report = planned(capsys, CONFIGS / "llama_70b_hybrid.json", "--world", 512)
    assert report["parameters"] == 70_553_706_496
    assert report["plan"]["mesh"] == {"sdp": 4, "fsdp": 16, "tp": 8}
    rank = report["plan"]["ranks"][0]
    embeddings = 2 * 128256 * 8192 + 8192  # the head and the last norm too
    held = embeddings + (70_553_706_496 - embeddings) / 2
    # Matrices are cut by tensor parallelism and sharded, the norms' 161 vectors are sharded alone;
    # 4 bytes an element.
    assert rank["parameters"] == pytest.approx(4 * held / 128, rel=1e-3)
    assert rank["gradients"] == rank["parameters"]
    assert rank["optimizer"] == 2 * rank["parameters"]
    assert 4 * rank["parameters"] < rank["peak"] < 80e9
    # 8 FLOP a parameter and token with full recomputation (embeddings look up), attention on top.
    tokens = 16 * 8192
    assert 8 * (held - 128256 * 8192) * tokens / 8 < rank["flops"] < 1.5 * 8 * held * tokens / 8


def test_a_plan_names_the_factors_of_rates_by_holders(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The factors change neither memory nor time, and a plan says so."""
    placement = {f"layers.{block}": [0] if block else [0, 1] for block in range(4)}
    usual = CONFIG | {"model": LLAMA | {"num_hidden_layers": 4}, "sdp": {"groups": 2, "placement": placement}}
    scaled = usual | {"sdp": {"groups": 2, "placement": placement, "lr_scale": 1.0}}
    plans = []
    for which in (usual, scaled):
        config.write_text(json.dumps(which))
        plans.append(planned(capsys, config, "--world", 2))
    assert plans[1] == plans[0]
    assert main(["plan", str(config), "--world", "2"]) == 0
    assert (
        "sdp.lr_scale 1.0 multiplies the learning rates of units by 0.80 (1 holder) to 1.60 (2 holders)."
        in capsys.readouterr().out
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "model.hidden_size=1000000000000"], "less than or equal to 16777216"),
        (["--set", "model.num_hidden_layers=1000000000"], "less than or equal to 65536"),
        (["--set", "model.vocab_size=1000000000000"], "less than or equal to 16777216"),
        (["--set", f"sdp.groups={10**18}"], "less than or equal to 1048576"),
        (["--set", f"tensor_parallel.autotp_size={10**18}"], "less than or equal to 1048576"),
        (["--set", f"train_batch_size={10**30}"], "less than or equal to 4294967296"),
        (["--set", f"train_micro_batch_size_per_gpu={10**30}"], "less than or equal to 4294967296"),
        (["--set", "train_micro_batch_size_per_gpu=1000000000"], "the planner takes at most 67,108,864"),
        (["--set", "sdp.groups=1048576", "tensor_parallel.autotp_size=4"], "planner takes up to 1,048,576"),
        (["--world", str(10**20)], "is too large; the most is 1,048,576"),
        (["--gpus-per-node", str(10**20)], "is too large; the most is 1,048,576"),
        (["--device-memory=-1GB"], "--device-memory -1GB: expected"),
        (["--device-memory", "-1GB"], "--device-memory"),
    ],
)
def test_plan_refuses(config: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plan", str(config), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", [["--nproc", str(10**20)], ["--rounds", str(10**20)], ["--steps", str(10**20)]])
def test_methods_refuse(config: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["bench", str(config), *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_plan_counts_the_operations_of_the_chosen_experts(tmp_path: Path, capsys: Any) -> None:
    """How many operations wider experts need more. The output is JSON, also with DeepSpeed."""
    pytest.importorskip("transformers")
    flops = []
    for width in (48, 96):
        folder = make(tmp_path / str(width), "mixtral", intermediate_size=width)
        config = {
            "train_micro_batch_size_per_gpu": 2, "sdp": {"groups": 1}, "data": {"sequence_length": 32},
            "model": {"name": "huggingface", "path": str(add_tokenizer(folder))},
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        flops.append(planned(capsys, tmp_path / "config.json", "--world", 1)["plan"]["ranks"][0]["flops"])
    tokens, layers, chosen, matrices, passes = 2 * 32, 3, 2, 3, 3
    assert flops[1] - flops[0] == 2 * tokens * layers * chosen * matrices * passes * 32 * 48
