"""Compares the chunked loss of ``sdp.models.layers`` with
``torch.nn.functional.linear_cross_entropy``.

Run it with ``python -m lab.measurements.loss_benchmark --rounds 5``. It needs torch 2.13.

Each measurement runs forward and backward in a process of its own, and the contestants take turns.
It prints the median of the CPU seconds, the least of them, the median memory at the peak above the
memory before the step, and the relative errors of the gradients against float64. CPU seconds differ
less than wall-clock seconds while other programs run.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sdp.models.layers import CHUNK_LOGITS, IGNORE_INDEX, linear_cross_entropy
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdp_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """This project's loss, with the chunks that ``LanguageModelHead`` chooses."""
    return linear_cross_entropy(hidden, weight, targets, max(CHUNK_LOGITS // len(weight), hidden.shape[1]))


def torch_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's chunked loss, with the options that torch chooses."""
    options: Any = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORE_INDEX, options=options)


def torch_loss_in_equal_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's chunked loss, with chunks as large as this project's."""
    rows = max(CHUNK_LOGITS // len(weight), hidden.shape[1])
    options: Any = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=min(rows, len(hidden)))
    return F.linear_cross_entropy(hidden, weight, targets, ignore_index=IGNORE_INDEX, options=options)


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss from all logits at once, without chunks."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORE_INDEX)


CONTESTANTS: dict[str, Loss] = {
    "sdp": sdp_loss,
    "torch": torch_loss,
    "torch, equal chunks": torch_loss_in_equal_chunks,
    "all logits": plain_loss,
}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Measure time, memory and errors of one contestant in this process."""
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    rows = torch.randn(args.tokens, args.hidden, generator=generator)
    table = torch.randn(args.vocabulary, args.hidden, generator=generator) * args.hidden**-0.5
    targets = torch.randint(args.vocabulary, (args.tokens,), generator=generator)
    hidden, weight = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (rows, table))
    del rows, table
    small = hidden[:8].detach().requires_grad_()
    plain_loss(small, weight, targets[:8]).backward()  # loads kernels
    weight.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = CONTESTANTS[args.contestant]
    start = time.process_time()
    value = loss(hidden, weight, targets)
    value.backward()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = {"seconds": seconds, "MiB": peak / 1024, "loss": value.item()}
    return found | (_errors(hidden, weight, targets) if args.errors else {})


def _errors(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, float]:
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    F.cross_entropy(F.linear(*exact), targets).backward()
    errors = {}
    for name, tensor, truth in zip(("hidden", "weight"), (hidden, weight), exact, strict=True):
        assert tensor.grad is not None and truth.grad is not None
        errors[name] = ((tensor.grad.double() - truth.grad).norm() / truth.grad.norm()).item()
    return errors


def main() -> None:
    """Measure all contestants in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--contestant", choices=list(CONTESTANTS), help="measure this one in this process")
    parser.add_argument("--errors", action="store_true", help="compare the gradients with those in float64 too")
    args = parser.parse_args()
    if args.contestant:
        print(json.dumps(measure(args)))
        return
    for dtype in [args.dtype] if args.dtype else ["float32", "bfloat16"]:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for index in range(args.rounds):
            for name in CONTESTANTS:
                command = [sys.executable, "-m", "lab.measurements.loss_benchmark"]
                command += ["--contestant", name, "--dtype", dtype]
                for key in ("tokens", "hidden", "vocabulary", "threads"):
                    command += [f"--{key}", str(getattr(args, key))]
                command += ["--errors"] if index == 0 else []
                found[name].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        for name, runs in found.items():
            seconds, memory = (statistics.median(run[key] for run in runs) for key in ("seconds", "MiB"))
            least = min(run["seconds"] for run in runs)
            errors = f"errors {runs[0]['hidden']:.1e} (hidden) {runs[0]['weight']:.1e} (weight)"
            print(
                f"{dtype:<9} {name:<20} {seconds:6.2f} s (least {least:.2f}) {memory:6.0f} MiB  loss "
                f"{runs[0]['loss']:.6f}  {errors}",
                flush=True,
            )


if __name__ == "__main__":
    main()
