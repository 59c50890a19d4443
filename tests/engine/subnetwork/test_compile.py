"""``training.compile``: equal blocks are compiled once, and what they compute stays the same."""

from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.cases import Case, full_gradients, one_step
from sdp.tests.support.forks.command import ForkedScript
from sdp.tests.support.ranks import RankPool
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

RELATIVE = 1e-5


def _run(case: Case, compiled: bool, eps: float | None = None) -> dict[str, Any]:
    """Two steps and an evaluation: losses, first gradients, and dynamo's graphs."""
    torch._dynamo.reset()
    inductor.compile_threads = 1  # no pool of processes beside the ranks
    model = models.build(case.model)
    if eps is not None:
        model.get_submodule("model.layers.1").input_layernorm.eps = eps  # type: ignore[union-attr]
    engine = sdp.initialize(model=model, config=case.config(training={"compile": compiled}))[0]
    counters.clear()
    data_rank = dist.get_rank()
    losses = [one_step(engine, case, 0, data_rank=data_rank)]
    gradients = full_gradients(engine)
    engine.step()
    losses.append(one_step(engine, case, 1, data_rank=data_rank))
    engine.step()
    graphs = counters["stats"]["unique_graphs"]
    held_out = [models.micro_batch(case.model, 9, 0, data_rank)]
    evaluated = [engine.evaluate(held_out), *engine.evaluate_subnetworks(held_out)]
    names = sorted(engine.full_state_dict() or {})
    return {
        "losses": losses + evaluated, "gradients": gradients, "graphs": graphs, "names": names,
        "breaks": dict(counters["graph_break"]),
    }  # fmt: skip


CASES = [
    Case(2, 1, 0, accumulation=2),
    pytest.param(Case(1, 2, 3, model="llama", placement="full", checkpointing="full"), marks=pytest.mark.slow),
    pytest.param(Case(2, 2, 3, model="even-llama-tied", neurons=5, placement="cyclic", masking="backward"),
        marks=pytest.mark.slow),
    pytest.param(Case(2, 2, 3, model="llama", masking="backward", sync='{"every": 2, "fragments": 2}'),
        marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_blocks_compile_once_and_compute_the_same(ranks: RankPool, case: Case) -> None:
    eager = ranks.run(_run, case, False, world=case.world)
    compiled = ranks.run(_run, case, True, world=case.world)
    for plain, fast in zip(eager, compiled, strict=True):
        # Of blocks that are trained and of frozen copies, or of blocks of two sets of slices; three
        # blocks or four, one graph.
        kinds = 2 if case.masking == "backward" else 1
        assert (plain["graphs"], fast["graphs"], fast["breaks"]) == (0, kinds, {})
        assert fast["losses"] == pytest.approx(plain["losses"], rel=RELATIVE)
        assert fast["names"] == plain["names"]
        assert set(fast["gradients"]) == set(plain["gradients"])
        for name, gradient in fast["gradients"].items():
            expected = plain["gradients"][name]
            torch.testing.assert_close(gradient, expected, rtol=0, atol=RELATIVE * expected.abs().max().item())


def _scheduled(case: Case, compiled: bool) -> tuple[list[float], dict[str, int], int]:
    """Losses of four steps, and evaluations after each; the breaks and the number of graphs."""
    torch._dynamo.reset()
    inductor.compile_threads = 1
    engine = sdp.initialize(model=models.build(case.model), config=case.config(training={"compile": compiled}))[0]
    counters.clear()
    losses, data_rank = [], dist.get_rank()
    for step in range(4):
        losses.append(one_step(engine, case, step, data_rank=data_rank))
        engine.step()
        losses.append(engine.evaluate([models.micro_batch(case.model, 9, 0, data_rank)]))
    return losses, dict(counters["graph_break"]), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("neurons", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_schedule_of_maskings_compiles_again(ranks: RankPool, neurons: int) -> None:
    masking = '[{"until": 2, "masking": "forward"}, {"masking": "backward"}]'
    # With whole blocks, the model is that of the first case above: torch has its graphs in a cache.
    case = Case(2, 1, model="even-llama" if neurons else "mlp", neurons=neurons, masking=masking)
    eager, compiled = (ranks.run(_scheduled, case, each, world=2) for each in (False, True))
    for (losses, _, none), (fast, breaks, graphs) in zip(eager, compiled, strict=True):
        assert fast == pytest.approx(losses, rel=RELATIVE)
        assert (none, breaks) == (0, {})
        assert graphs > 1


def test_without_a_compiler_it_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sdp, torch; from torch._inductor import config as inductor\n"
        "from sdp.engine.subnetwork.execution import compile_units\n"
        "inductor.cpp.cxx = ('no-such-compiler',)  # as CXX has it, which torch has read\n"
        "try: compile_units(torch.nn.Sequential(), [], torch.device('cpu'))\n"
        "except sdp.engine.errors.ConfigError as error: print(error)"
    )
    code, printed = ForkedScript(script, environment={"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}).end()
    assert (code, printed.count("\n")) == (0, 1), printed
    assert "training.compile: torch.compile does not work here for cpu (" in printed
    assert "it needs a C++ compiler (CXX): install it, or set training.compile to false" in printed
