"""Makes corpora, trains and measures losses for the study of paths.

    python -m lab.paths texts OUT DIR…    write four kinds of text of this machine, 4 MB each
    python -m lab.paths label CORPUS OUT  copy a corpus, with the cluster as each first token
    python -m lab.paths grid GRID OUT     train what is missing of a grid, each run in one process
    python -m lab.paths prompts OUT       add losses of runs of ``lab.grid``, which have checkpoints

``grid`` computes what ``sdp train`` does, in less than half of the time. A row that owns ``["*"]``
has independent experts: nothing is shared, and each expert has an optimizer of its own.

``grid`` and ``prompts`` add losses after prompts of some lengths to ``OUT/prompts.json``. The
router of the corpus chooses the path for a prompt. If the prompt is longer or shorter than those
that the router was trained with, the router's biases are scaled in proportion.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sdp.data.clusters import CLUSTERS, Router, load_router, read_clusters
from sdp.data.files import INDEX_FILE
from sdp.data.index import SPLITS
from sdp.data.shards import TokenDataset
from sdp.engine.batch.call import call_model, loss_of
from sdp.engine.batch.loader import ResumableLoader
from sdp.engine.config.load import load_config
from sdp.engine.config.schema import Config, NamedParams, SDPSection
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError, SDPError
from sdp.engine.optim.clip import clip_, squared_norm
from sdp.engine.optim.optimizers import build_optimizer
from sdp.engine.optim.schedules import scheduler_of
from sdp.engine.placement.layout import Layout
from sdp.models.registry import build_model
from sdp.tools.runs import saved_run
from sdp.tools.runs.dataset import Corpus, open_corpus
from sdp.tools.runs.whole_model import IN_ONE_PROCESS, WholeModel, whole_model
from torch import nn

from .grid.grid_file import GridRun, read_grid
from .grid.report import later_runs, report
from .grid.runs import Results, prepared_data, run_all
from .simulator.training import Simulation, with_first_values

PROMPTS = (16, 64, 128)
TUNED_AT = 64  # bytes of the prompt after which losses choose the rates
EVERY = 8  # of so many held-out sequences, one is read
BYTES, LARGEST, SMALLEST = 4_000_000, 400_000, 500  # of a kind, and of a file
ROWS = 64  # sequences of a pass


def write_texts(out: Path, folders: Sequence[Path]) -> None:
    """Write a .jsonl file for each kind of text: Python, C headers, documentation, and JSON."""
    out.mkdir(parents=True, exist_ok=True)
    library = [Path(sysconfig.get_paths()["stdlib"])]
    kinds = {
        "py": (["*.py"], library, ("test", "site-packages")),
        "h": (["*.h"], [Path("/usr/include")], ()),
        "md": (["*.rst", "*.txt", "*.md"], folders, ()),
        "json": (["*.json"], folders, ("min.",)),
    }
    for kind, (patterns, roots, skipped) in kinds.items():
        found = (path for root in roots for pattern in patterns for path in root.rglob(pattern))
        paths = sorted(path for path in found if _is_wanted(path, skipped))
        random.Random(0).shuffle(paths)
        texts, size = list[str](), 0
        for path in paths:
            content = path.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            if "\0" in text:
                continue
            texts.append(text)
            size += len(content)
            if size > BYTES:
                break
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (out / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{kind}: {len(texts)} files, {size:,} bytes")


def _is_wanted(path: Path, skipped: Sequence[str]) -> bool:
    if path.is_symlink() or not path.is_file() or any(part in str(path) for part in skipped):
        return False
    return SMALLEST < path.stat().st_size < LARGEST


def label(corpus: Path, out: Path) -> None:
    """Write ``corpus`` to ``out``, with its cluster as a token before each sequence."""
    router = load_router(corpus / CLUSTERS)
    about = json.loads((corpus / CLUSTERS / "router.json").read_text(encoding="utf-8"))
    index = json.loads((corpus / INDEX_FILE).read_text(encoding="utf-8"))
    length, size = about["sequence_length"], router.vocab_size
    out.mkdir(parents=True)
    for split in SPLITS:
        dataset = TokenDataset(corpus, split, length)
        sequences = np.stack([dataset.read_prefix(item, length) for item in range(len(dataset))])
        labelled = np.concatenate([read_clusters(dataset)[:, None].astype(np.int64) + size, sequences], 1)
        content, name = labelled.astype("<u2").tobytes(), f"{split}-00000.bin"
        (out / name).write_bytes(content)
        shard = index["splits"][split]["shards"][0]
        shard |= {"file": name, "tokens": labelled.size, "sha256": hashlib.sha256(content).hexdigest()}
        index["splits"][split] |= {"tokens": labelled.size, "shards": [shard]}
    index |= {"vocab_size": size + router.count, "dtype": "uint16"}
    (out / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


class PathsInTurn:
    """A training of all paths of a run, one after the other in this process.

    If the configuration has no paths, this is the training of the dense model.

    Args:
        config: The configuration of the run.
        corpus: The data, divided among the paths.
    """

    def __init__(self, config: Config, corpus: Corpus):
        section, groups = config.sdp.paths, config.sdp.groups
        count = section.count if section is not None else 1
        if count not in (1, groups):
            raise ConfigError("sdp.groups: every path has one group here; set it to sdp.paths.count")
        first = build_model(config.model, **corpus.facts)
        dense = config.model_copy(update={"sdp": SDPSection()})
        with_first_values(dense, first, torch.device("cpu"))
        self.models = [first, *(copy.deepcopy(first) for _ in range(count - 1))]
        self._shared, together = list[nn.Parameter](), [self.models]
        if section is not None and section.own == ["*"]:
            together = [[model] for model in self.models]
        elif section is not None:
            layout = Layout.of(build_model(config.model, **corpus.facts), config, Mesh(groups))
            self._share({name for name, info in layout.parameters.items() if not info.prefix})
        self._parts = [_Part(config, models) for models in together]
        rows = (config.train_micro_batch_size_per_gpu or 1) * groups // count
        self._batches = [
            iter(ResumableLoader(corpus.train, rows, rank, count, config.training.seed, collate_fn=corpus.collate))
            for rank in range(count)
        ]

    def _share(self, names: set[str]) -> None:
        """Put the parameters of the first model into all others."""
        first = self.models[0]
        names_of = {id(parameter): name for name, parameter in first.named_parameters()}
        for path, parameter in first.named_parameters(remove_duplicate=False):
            if names_of[id(parameter)] not in names:
                continue
            module, _, name = path.rpartition(".")
            for model in self.models[1:]:
                setattr(model.get_submodule(module), name, parameter)
        self._shared = [first.get_parameter(name) for name in names]

    def step(self) -> float:
        """Make one optimizer step of all paths, and return the mean loss."""
        losses = []
        for model, batches in zip(self.models, self._batches, strict=True):
            loss = loss_of(call_model(model, next(batches)))
            loss.backward()
            losses.append(loss.item())
        for parameter in self._shared:
            assert parameter.grad is not None
            parameter.grad /= len(self.models)
        for part in self._parts:
            part.step()
        return sum(losses) / len(losses)


class _Part:
    """Models that share one optimizer, and one norm of the gradient."""

    def __init__(self, config: Config, models: Sequence[nn.Module]):
        unique = {id(parameter): parameter for model in models for parameter in model.parameters()}
        self._parameters, self._most = list(unique.values()), config.gradient_clipping
        section = config.optimizer or NamedParams(type="AdamW")
        self._optimizer, _ = build_optimizer(section.type, section.params, self._parameters, torch.device("cpu"))
        self._scheduler = scheduler_of(config, None, self._optimizer)

    def step(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = math.sqrt(squared_norm(gradients, torch.device("cpu")).item())
        if self._most:
            clip_(gradients, norm, self._most)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()


def train(config: Config, folder: Path) -> list[nn.Module]:
    """Train in this process. Returns the model of each path, or the only model."""
    corpus, steps = open_corpus(config, folder), config.training.steps or 0
    if config.sdp.paths is None and config.sdp.capacity != 1.0:
        run = Simulation(config, build_model(config.model, **corpus.facts), torch.device("cpu"))
        rows = (config.train_micro_batch_size_per_gpu or 1) * config.sdp.groups
        batches = iter(ResumableLoader(corpus.train, rows, seed=config.training.seed, collate_fn=corpus.collate))
        for _ in range(steps):
            run.step([next(batches)])
        return [run.model]
    paths = PathsInTurn(config, corpus)
    for step in range(steps):
        loss = paths.step()
        if (step + 1) % config.steps_per_print == 0:
            print(f"step {step + 1}: loss {loss:.4f}", file=sys.stderr, flush=True)
    return paths.models


def held_out(corpus: Path) -> tuple[torch.Tensor, int]:
    """Return held-out sequences (sequences, tokens), and the size of their vocabulary."""
    about = json.loads((corpus / CLUSTERS / "router.json").read_text(encoding="utf-8"))
    dataset = TokenDataset(corpus, "held_out", about["sequence_length"])
    rows = [dataset[row]["input_ids"] for row in range(0, len(dataset), EVERY)]
    return torch.stack(rows), about["vocab_size"]


def token_losses(models: Sequence[WholeModel], tokens: torch.Tensor, clusters: int, size: int) -> torch.Tensor:
    """Return the loss of each token under each path, (paths, sequences, tokens − 1).

    A model may read the cluster as the first token (:func:`label`). Then ``clusters`` is the number
    of clusters, whose tokens follow ``size`` ordinary tokens, and the model counts as that many
    paths. For other models, ``clusters`` is 0.
    """
    found = list[torch.Tensor]()
    for model in models:
        for cluster in range(max(clusters, 1)):
            labelled = torch.full((len(tokens), int(clusters > 0)), size + cluster)
            inputs = torch.cat([labelled, tokens], 1)
            parts = [model.target_losses({"input_ids": part, "labels": part}) for part in inputs.split(ROWS)]
            found.append(torch.cat(parts)[:, labelled.shape[1] :])
    return torch.stack(found)


def saved_losses(run: Path, tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return the losses of :func:`token_losses` for the newest checkpoint of a run."""

    def losses(saved: saved_run.SavedRun) -> torch.Tensor:
        section = saved.config.sdp.paths
        vocab_size = TokenDataset(saved.data, "held_out", saved.config.data.sequence_length).vocab_size
        built, found = build_model(saved.config.model, vocab_size=vocab_size), list[torch.Tensor]()
        for path in range(section.count if section is not None else 1):
            with whole_model(saved, built, path) as model:
                found.append(token_losses([model], tokens, vocab_size - size, size))
        return torch.cat(found)

    return saved_run.use(saved_run.CheckpointChoice(run), losses, IN_ONE_PROCESS)


def with_prompt(router: Router, prompt: int) -> Router:
    """Return the router for prompts of another length, with scaled biases."""
    grown = router.biases * np.float32((prompt - 1) / (router.prefix - 1))
    return replace(router, prefix=prompt, biases=grown)


def after_prompt(router: Router, tokens: torch.Tensor, losses: torch.Tensor, prompt: int) -> dict[str, float]:
    """Return mean losses of the tokens after a prompt of ``prompt`` tokens.

    ``loss`` is that of the path that the router chooses, or of the only model. With several paths,
    it is compared with the best single path, an ensemble, and the best path in hindsight.
    """
    rest = losses[:, :, prompt - 1 :].double()
    if len(losses) == 1:
        return {"loss": rest.mean().item()}
    scores = torch.from_numpy(with_prompt(router, prompt).scores(tokens.numpy()))
    routed = rest[scores.argmax(1), torch.arange(len(tokens))]
    mixed = (scores.log_softmax(1).T[..., None] - rest).logsumexp(0)
    return {
        "loss": routed.mean().item(),
        "best single path": rest.mean((1, 2)).min().item(),
        "ensemble": -mixed.mean().item(),
        "best path in hindsight": rest.mean(2).min(0).values.mean().item(),
    }


class Prompts:
    """The losses of runs after prompts, which are kept in ``out/prompts.json``."""

    def __init__(self, out: Path, corpus: Path):
        self._path, self._router = out / "prompts.json", load_router(corpus / CLUSTERS)
        self.tokens, self.size = held_out(corpus)
        content = self._path.read_text(encoding="utf-8") if self._path.exists() else "{}"
        self.known: dict[str, Any] = json.loads(content)

    def add(self, name: str, losses: torch.Tensor) -> None:
        after = {str(prompt): after_prompt(self._router, self.tokens, losses, prompt) for prompt in PROMPTS}
        self.known[name] = {"sequences": len(self.tokens), **after}
        self._path.write_text(json.dumps(self.known, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(self.known[name]), flush=True)


def train_grid(path: Path, out: Path, corpus: Path) -> int:
    """Train the missing runs of a grid, add their losses after prompts, and print its table."""
    grid = read_grid(path)
    out.mkdir(parents=True, exist_ok=True)
    data, digest = prepared_data(grid.first_runs()[0], out)
    results, prompts = Results(out / "results.json", digest), Prompts(out, corpus)

    def trained(run: GridRun, path: Path, folder: Path) -> tuple[list[dict[str, Any]], float | None]:
        config, started, seconds = load_config(path), time.perf_counter(), None
        if run.name not in prompts.known:
            models = [WholeModel(model.eval(), torch.device("cpu")) for model in train(config, folder)]
            seconds = time.perf_counter() - started
            read = TokenDataset(str(config.data.path), "held_out", config.data.sequence_length)
            clusters = read.vocab_size - prompts.size
            prompts.add(run.name, token_losses(models, prompts.tokens, clusters, prompts.size))
        loss = prompts.known[run.name][str(TUNED_AT)]["loss"]
        return [{"step": config.training.steps, "loss": loss}], seconds

    failed = list(run_all(grid.first_runs(), out, data, results, 1, trained))
    failed += run_all(list(later_runs(grid, results)), out, data, results, 1, trained)
    print(report(grid, out, results, data))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.paths", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts")
    texts.add_argument("out", type=Path)
    texts.add_argument("folders", type=Path, nargs="+", help="where documentation and JSON are")
    labelled = commands.add_parser("label")
    labelled.add_argument("corpus", type=Path)
    labelled.add_argument("out", type=Path)
    grid = commands.add_parser("grid")
    grid.add_argument("grid", type=Path)
    after = commands.add_parser("prompts")
    for command in (grid, after):
        command.add_argument("out", type=Path)
        command.add_argument("--corpus", type=Path, default=Path("corpus"), help="the corpus with the router")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if args.command == "texts":
            write_texts(args.out, args.folders)
        elif args.command == "label":
            label(args.corpus, args.out)
        elif args.command == "grid":
            return train_grid(args.grid, args.out, args.corpus)
        else:
            prompts = Prompts(args.out, args.corpus)
            for run in sorted((args.out / "runs").iterdir()):
                if run.name not in prompts.known and any(run.glob("checkpoints/step-*")):
                    prompts.add(run.name, saved_losses(run, prompts.tokens, prompts.size))
    except (SDPError, OSError) as error:
        print(f"lab.paths: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
