"""Corpora and losses for the study of paths.

    python -m lab.paths texts OUT DIR…    four kinds of text of this machine, 4 MB each
    python -m lab.paths label CORPUS OUT  the corpus, with the cluster as each first token
    python -m lab.paths prompts OUT       the losses of a grid's runs after prompts of some lengths

The last one needs the checkpoints of the runs, and adds ``prompts.json`` to the folder of the grid.
It routes by the router of the corpus. For a prompt of another length than the router was trained
with, the biases grow with the length.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sdp.data.clusters import CLUSTERS, Router, load_router, read_clusters
from sdp.data.index import SPLITS
from sdp.data.shards import TokenDataset
from sdp.data.shared.files import INDEX_FILE
from sdp.engine.errors import SDPError
from sdp.models.registry import build_model
from sdp.tools.runs import saved_run
from sdp.tools.runs.whole_model import IN_ONE_PROCESS, whole_model

PROMPTS = (16, 64, 128)
EVERY = 8  # of so many held-out sequences, one is read
BYTES, LARGEST, SMALLEST = 4_000_000, 400_000, 500  # of a kind, and of a file
ROWS = 64  # sequences of a pass


def write_texts(out: Path, folders: Sequence[Path]) -> None:
    """Write a .jsonl of each kind: Python, C headers, documentation, and JSON."""
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
    """Write ``corpus`` to ``out``. The first token of a sequence is its cluster."""
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


def token_losses(run: Path, corpus: Path, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return held-out sequences (sequences, tokens), and their losses under each path.

    A model that reads its cluster as the first token counts as one path for each cluster. The
    losses have the shape (paths, sequences, tokens − 1).
    """
    about = json.loads((corpus / CLUSTERS / "router.json").read_text(encoding="utf-8"))
    length, size = about["sequence_length"], about["vocab_size"]
    dataset = TokenDataset(corpus, "held_out", length)
    tokens = torch.stack([dataset[row]["input_ids"] for row in rows])

    def losses(saved: saved_run.SavedRun) -> torch.Tensor:
        section, vocab_size = saved.config.sdp.paths, TokenDataset(saved.data, "held_out", length).vocab_size
        clusters, count = vocab_size - size, section.count if section is not None else 1
        built, found = build_model(saved.config.model, vocab_size=vocab_size), list[torch.Tensor]()
        for path in range(count):
            with whole_model(saved, built, path) as model:
                for cluster in range(max(clusters, 1)):
                    labelled = torch.full((len(rows), int(clusters > 0)), size + cluster)
                    inputs = torch.cat([labelled, tokens], 1)
                    parts = [model.target_losses({"input_ids": part, "labels": part}) for part in inputs.split(ROWS)]
                    found.append(torch.cat(parts)[:, labelled.shape[1] :])
        return torch.stack(found)

    return tokens, saved_run.use(saved_run.CheckpointChoice(run), losses, IN_ONE_PROCESS)


def with_prompt(router: Router, prompt: int) -> Router:
    """Return the router for prompts of another length."""
    grown = router.biases * np.float32((prompt - 1) / (router.prefix - 1))
    return replace(router, prefix=prompt, biases=grown)


def after_prompt(router: Router, tokens: torch.Tensor, losses: torch.Tensor, prompt: int) -> dict[str, float]:
    """Return the mean losses of the tokens after a prompt: routed, and what else could be run."""
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


def prompts(out: Path, corpus: Path) -> dict[str, Any]:
    """Return the losses of all runs in ``out`` that have a checkpoint and are not known yet."""
    path, router = out / "prompts.json", load_router(corpus / CLUSTERS)
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    length = json.loads((corpus / CLUSTERS / "router.json").read_text(encoding="utf-8"))["sequence_length"]
    rows = range(0, len(TokenDataset(corpus, "held_out", length)), EVERY)
    for run in sorted((out / "runs").iterdir()):
        if run.name in known or not any(run.glob("checkpoints/step-*")):
            continue
        tokens, losses = token_losses(run, corpus, rows)
        losses_after = {str(prompt): after_prompt(router, tokens, losses, prompt) for prompt in PROMPTS}
        known[run.name] = {"sequences": len(tokens), **losses_after}
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(run.name, json.dumps(known[run.name]), flush=True)
    return known


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.paths", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts")
    texts.add_argument("out", type=Path)
    texts.add_argument("folders", type=Path, nargs="+", help="where documentation and JSON are")
    labelled = commands.add_parser("label")
    labelled.add_argument("corpus", type=Path)
    labelled.add_argument("out", type=Path)
    after = commands.add_parser("prompts")
    after.add_argument("out", type=Path)
    after.add_argument("--corpus", type=Path, default=Path("corpus"), help="the corpus with the router")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if args.command == "texts":
            write_texts(args.out, args.folders)
        elif args.command == "label":
            label(args.corpus, args.out)
        else:
            prompts(args.out, args.corpus)
    except (SDPError, OSError) as error:
        print(f"lab.paths: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
