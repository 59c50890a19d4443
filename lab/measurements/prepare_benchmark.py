"""Compares ``sdp prepare`` with the packages ``tokenizers`` and ``datatrove`` on the same input.

Run it with ``python -m lab.measurements.prepare_benchmark --rounds 5``. It needs
``pip install 'sdp-engine[bench]'``, and no network.

All contestants read the same JSON lines, encode them with the same tokenizer, and write the ids.
The contestants take turns. It prints CPU seconds (user and system, of all processes) and wall-clock
seconds, the median and the least of the rounds. CPU seconds differ less than wall-clock seconds
while other programs run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = 32_000
END = "<|endoftext|>"
FILES = 4  # datatrove divides whole files among its workers
BATCH_CHARACTERS = 1_000_000
_PR_SET_CHILD_SUBREAPER = 36

CONTESTANTS = ("encode_batch", "encode_batch_fast", "sdp", "datatrove")


class Cost(NamedTuple):
    """The cost of one run: CPU seconds of all its processes, and wall-clock seconds."""

    cpu: float
    wall: float


def texts(most_bytes: int) -> Iterator[str]:
    """Yield the sources of installed packages and of the standard library, each text once."""
    read = 0
    for folder in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[folder]).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip() and len(text) < BATCH_CHARACTERS:
                read += len(text.encode())
                yield text
            if read > most_bytes:
                return


def write_input(folder: Path, most_bytes: int) -> int:
    """Write documents, and a tokenizer trained on some of them. Returns the documents' bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    documents = list(texts(most_bytes))
    (folder / "input").mkdir()
    for number in range(FILES):
        lines = (json.dumps({"text": text, "id": str(index)}) for index, text in enumerate(documents[number::FILES]))
        (folder / f"input/{number}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    own: Any = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)  # type: ignore[call-arg]
    own.train_from_iterator(documents[:: max(1, len(documents) // 1000)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token=END).save_pretrained(folder / "tokenizer")
    return sum(len(text.encode()) for text in documents)


# -- contestants, each in a process of its own -----------------------------------------------------


def run_tokenizers(folder: Path, *, fast: bool) -> None:
    """Encode with the package ``tokenizers`` alone."""
    import numpy as np
    from tokenizers import Tokenizer

    own: Any = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    encode = own.encode_batch_fast if fast else own.encode_batch
    end = np.asarray([own.token_to_id(END)], dtype=np.uint16)

    def write(batch: list[str], out: Any) -> None:
        for encoding in encode(batch, add_special_tokens=False):
            out.write(np.asarray(encoding.ids, dtype=np.uint16).tobytes() + end.tobytes())

    with (folder / "out/tokens.bin").open("wb") as out:
        batch: list[str] = []
        characters = 0
        for path in sorted((folder / "input").glob("*.jsonl")):
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    batch.append(json.loads(line)["text"])
                    characters += len(batch[-1])
                    if characters > BATCH_CHARACTERS:
                        write(batch, out)
                        batch, characters = [], 0
        write(batch, out)


def run_datatrove(folder: Path, workers: int) -> None:
    """Encode with datatrove, without shuffling."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps: list[Any] = [
        JsonlReader(str(folder / "input")),
        DocumentTokenizer(
            output_folder=str(folder / "out"), tokenizer_name_or_path=str(folder / "tokenizer/tokenizer.json"),
            eos_token=END, shuffle_documents=False, save_index=True,
        ),
    ]  # fmt: skip
    LocalPipelineExecutor(
        steps, tasks=workers, workers=workers, logging_dir=str(folder / "out/logs"), skip_completed=False
    ).run()


def command_of(name: str, workers: int, folder: Path) -> list[str]:
    """Return the command line that runs a contestant."""
    if name == "sdp":
        words = ["-m", "sdp", "prepare", "--input", f"{folder}/input/*.jsonl", "--output", f"{folder}/out/shards"]
        return [sys.executable, "-P", *words, "--tokenizer", f"hf:{folder}/tokenizer", "--workers", str(workers)]
    words = ["--only", name, "--workers", str(workers), "--folder", str(folder)]
    return [sys.executable, "-m", __spec__.name, *words]


def measure(name: str, workers: int, folder: Path) -> tuple[Cost, int]:
    """Run a contestant once. Return its cost, and the bytes of tokens that it wrote."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    # The package's threads are this contestant's workers. The others have a process for each.
    threads = workers if name.startswith("encode_batch") else 1
    environ = os.environ | {
        "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower(), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    finished = subprocess.run(command_of(name, workers, folder), env=environ, capture_output=True, text=True)
    wall = time.perf_counter() - started
    if finished.returncode:
        raise SystemExit(f"{name} failed:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
    reap_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    written = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.suffix in (".bin", ".ds"))
    return Cost(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall), written


def reap_orphans() -> None:
    """Wait for the processes that a contestant has left behind, so that their seconds count."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> None:
    """Measure all contestants in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=64, help="size of the input")
    parser.add_argument("--only", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        if options.only == "datatrove":
            run_datatrove(options.folder, options.workers)
        else:
            run_tokenizers(options.folder, fast=options.only == "encode_batch_fast")
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_input(folder, options.megabytes * 1_000_000)
        print_table(folder, size, options.rounds)


def print_table(folder: Path, size: int, rounds: int) -> None:
    """Measure all contestants in some rounds, and print costs and ratios."""
    print(f"{size / 1e6:.1f} MB of text, {os.cpu_count()} processors, {rounds} rounds")
    costs: dict[tuple[str, int], list[Cost]] = {}
    written: dict[str, int] = {}
    for _ in range(rounds):
        for workers in (1, 2):
            for contestant in CONTESTANTS:
                cost, written[contestant] = measure(contestant, workers, folder)
                costs.setdefault((contestant, workers), []).append(cost)
    base = statistics.median(cost.cpu for cost in costs["encode_batch", 1])
    print(
        "contestant         workers  CPU s (least)  of encode_batch  wall s (least)  MB/s  faster than 1  bytes of "
        "tokens"
    )
    for (contestant, workers), found in costs.items():
        cpu, wall = (statistics.median(values) for values in zip(*found, strict=True))
        least = Cost(*map(min, zip(*found, strict=True)))
        alone = statistics.median(cost.wall for cost in costs[contestant, 1])
        print(
            f"{contestant:<18} {workers:>7}  {cpu:>5.2f} ({least.cpu:.2f})  {cpu / base:>15.2f}  {wall:>6.2f} "
            f"({least.wall:.2f})"
            f"  {size / 1e6 / wall:>4.1f}  {alone / wall:>13.2f}  {written[contestant]:>15,}"
        )


if __name__ == "__main__":
    main()
