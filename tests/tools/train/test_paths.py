"""``sdp train`` with paths: a run, a resume, an export, and a branch from an exported path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sdp
import torch
from safetensors.torch import load_file
from sdp.data.clusters import load_router, make_clusters
from sdp.data.shards import TokenDataset
from sdp.engine.batch.loader import evaluation_rows
from sdp.engine.errors import ConfigError, DataError
from sdp.tests.support.foreign.given_models import add_tokenizer, make, prepared
from sdp.tests.support.small_runs import read_losses, run_sdp, write_config
from sdp.tools.cli import main


def test_paths_from_a_run_to_a_branch(
    config: dict, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    make_clusters(tmp_path / "corpus", 2, 16, 32, progress=False)
    config["data"]["path"] = str(tmp_path / "corpus")
    config["sdp"] = {"groups": 2, "paths": {"count": 2, "own": ["model.layers.3"]}, "check_interval": 1}
    config["training"] |= {"steps": 4, "save_every": 2, "evaluate_every": 2, "evaluate_batches": 99}
    path, run, out = write_config(config, tmp_path), tmp_path / "run", tmp_path / "out"
    first = run_sdp("train", path, "--dump-dir", run)
    assert first.returncode == 0, first.stderr
    assert "paths: 2; each path owns 1 of the 4 blocks; group g trains path g mod 2" in first.stderr
    assert "sdp 2 × fsdp 1, 2 paths" in first.stdout
    summary = json.loads((run / "summary.json").read_text())
    for rank in summary["ranks"]:
        assert rank["state_measured"] == rank["state_predicted"]
        assert rank["state_measured"]["parameters"] == summary["dense_state_bytes"]["parameters"]
    assert rank["comm_bytes_per_step"]["between groups/all_reduce"] < summary["ddp_comm_bytes_per_step"]

    second = run_sdp("train", path, "--dump-dir", run, "--resume", "--nproc", 4, "--set", "training.steps=6")
    assert second.returncode == 0, second.stderr
    assert len(read_losses(run)) == 6

    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    last = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert evaluated["loss"] == pytest.approx(last["loss"], rel=1e-5) == pytest.approx(evaluated["in_training"])
    assert evaluated["loss_after_prefix"] == pytest.approx(last["loss_after_prefix"], rel=1e-5)
    # The run leaves out other incomplete micro-batches here. The paths differ by 5e-3.
    assert evaluated["path_losses"] == pytest.approx(last["subnetwork_losses"], rel=1e-3)
    assert main(["export", str(run), "--to", "hf", str(out)]) == 0
    assert "in a folder for each of 2 paths; the router too" in capsys.readouterr().out
    weights = [load_file(out / f"path-{path}" / "model.safetensors") for path in range(2)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]) == (not name.startswith("model.layers.3.")), name
    assert main(["export", str(run), "--to", "hf", str(out)]) == 2
    assert "path-0: exists already" in capsys.readouterr().err

    exported = sdp.load_paths(out)
    prompt, router = "alpha beta gamma", load_router(tmp_path / "corpus" / "clusters")
    path_of_prompt = exported.route(prompt)
    assert path_of_prompt == router.route(np.array([list(prompt.encode())]))[0]
    continued = exported.generate(prompt, max_new_tokens=4, do_sample=False)
    assert continued.startswith(prompt) and continued != prompt
    assert continued == exported.generate(prompt, path_of_prompt, 4, do_sample=False)
    with pytest.raises(DataError, match="two tokens"):
        exported.generate("a")
    with pytest.raises(ConfigError, match="path 2 does not exist; there are paths 0 to 1"):
        exported.generate(prompt, path=2)
    with pytest.raises(ConfigError, match="has no path-0"):
        sdp.load_paths(tmp_path)
    check_losses(evaluated, exported, TokenDataset(tmp_path / "corpus", "held_out", 32))
    assert main(["evaluate", str(run)]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.split() == f"all, by the router's weights {evaluated['ensemble_loss_after_prefix']:.4f}".split()
    shutil.rmtree(out / "router")
    with pytest.raises(ConfigError, match="has no router"):
        sdp.load_paths(out).generate(prompt)

    branch = tmp_path / "branch"
    third = run_sdp("train", path, "--dump-dir", branch, "--set", f"training.init_from={out / 'path-1'}")
    assert third.returncode == 0, third.stderr
    starts = [json.loads(line)["subnetwork_losses"] for line in (branch / "evaluations.jsonl").read_text().splitlines()]
    ends = [json.loads(line)["subnetwork_losses"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert starts[0][1] == pytest.approx(ends[-1][1], rel=1e-5), "the path goes on from where it was"


def test_paths_of_a_given_model_route_with_its_tokenizer(config: dict, tmp_path: Path) -> None:
    """The router keeps the tokenizer, which is a folder, also when it is exported."""
    start = add_tokenizer(make(tmp_path / "start", "llama"))
    data = prepared(tmp_path, start)
    make_clusters(data, 2, 16, 32, progress=False)
    config["model"], config["data"]["path"] = {"name": "huggingface", "path": str(start)}, str(data)
    config["sdp"] = {"groups": 2, "paths": {"count": 2, "own": ["model.layers.2"]}}
    config["training"] |= {"steps": 2}
    run, out = tmp_path / "run", tmp_path / "out"
    done = run_sdp("train", write_config(config, tmp_path), "--dump-dir", run)
    assert done.returncode == 0, done.stderr
    assert main(["export", str(run), str(out)]) == 0
    shutil.rmtree(start)
    shutil.rmtree(data)
    exported = sdp.load_paths(out)
    assert exported.generate("w1 w8 w15", max_new_tokens=4).startswith("w1 w8 w15")


def check_losses(evaluated: dict[str, Any], exported: sdp.tools.runs.paths.Paths, held_out: TokenDataset) -> None:
    """Compare what ``sdp evaluate`` found with the exported models of transformers."""
    rows = evaluation_rows(len(held_out), evaluated["sequences"])  # an incomplete micro-batch is left out
    tokens = torch.stack([held_out[row]["input_ids"] for row in rows])
    router = exported.router
    assert router is not None
    scores = torch.from_numpy(router.log_likelihoods(tokens.numpy()) + router.biases)
    paths, weights = scores.argmax(1), scores.softmax(1)
    with torch.no_grad():
        likely = torch.stack(
            [exported.model(path)(tokens).logits[:, :-1].double().log_softmax(-1) for path in range(2)]
        )
    of_targets = likely.gather(-1, tokens[None, :, 1:, None].expand(2, -1, -1, -1))[..., 0]
    rest = of_targets[:, :, router.prefix - 1 :]
    for path in range(2):
        assert evaluated["single_path_losses"][path] == pytest.approx(-of_targets[path].mean().item(), rel=1e-5)
        wanted = -rest[path].mean().item()
        assert evaluated["single_path_losses_after_prefix"][path] == pytest.approx(wanted, rel=1e-5)
        for cluster in range(2):
            wanted = -of_targets[path][paths == cluster].mean().item()
            assert evaluated["cluster_losses"][path][cluster] == pytest.approx(wanted, rel=1e-5)
    together = (weights.T[..., None] * rest.exp()).sum(0).log().mean().item()
    assert evaluated["ensemble_loss_after_prefix"] == pytest.approx(-together, abs=1e-6)
    assert abs(-together - evaluated["loss_after_prefix"]) > 3e-6, "so the weights of the router matter"


def test_paths_are_checked(config: dict, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    make_clusters(tmp_path / "corpus", 2, 16, 32, progress=False)
    config["data"]["path"] = str(tmp_path / "corpus")
    config["sdp"] = {"groups": 2, "paths": {"count": 2, "own": ["model.layers.3"]}}
    checked = run_sdp("train", write_config(config, tmp_path), "--dump-dir", tmp_path / "run", "--check")
    assert checked.returncode == 0, checked.stderr
    assert "as configured: 3 steps; after each, holders have equal weights and optimizer state" in checked.stdout
    assert "as configured: not compared with plain torch: plain torch has no paths" in checked.stdout


def test_a_plan_of_paths(config: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config["sdp"] = {"groups": 4, "paths": {"count": 2, "own": ["model.layers.2", "model.layers.3"]}}
    path = str(write_config(config, tmp_path))
    assert main(["plan", path, "--world", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["warnings"] == []
    assert main(["plan", path, "--world", "4", "--compare"]) == 0
    shown = capsys.readouterr().out
    assert "\npaths  " in shown and "\npaths, local steps  " in shown and "SDP, backward" not in shown
