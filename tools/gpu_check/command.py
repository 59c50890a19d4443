"""``sdp gpu-check``: memory and speed of one rank of dense and SDP runs on this GPU, next to the
plan.

Takes under 8 minutes. Every row is the share of one rank among 8 groups. The other ranks do not
exist (torch's fake process group: collectives return at once). So the memory is exact, and the
speed is an upper bound: that of a network that hides all traffic. The most important rows are
measured first. The report is written after every row, and names the rows for which no time is left.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...engine.accounting.quantities import format_bytes
from ...engine.environment.detect import detect
from ...engine.errors import ConfigError, LaunchError
from ...engine.tracing.operators import Device
from ..shared.arguments import positive_int, positive_number
from ..shared.device_peaks import NOMINAL_TFLOPS
from .check import Check, write_report
from .rows import CONFIGS, GROUPS, NAMES, Job, Plans, Row, job_of, rows
from .share import matmul_rate, measure

MINUTES = 7.5
MATMUL, TINY_MATMUL = 8192, 128
MOST_WORKERS = 6
COUNTED = (
    "2 operations for each multiplication and addition of matrix products, attention over all S x S although half is "
    "enough"
)


@dataclass(frozen=True)
class CheckOptions:
    """The measurements to make, where, and for how long. The fields have the names of the
    options.
    """

    json: Path | None
    device: Device
    configs: tuple[str, ...]
    variants: tuple[str, ...]
    micro_batch: int | None
    minutes: float
    dry_run: bool
    tiny: bool

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> CheckOptions:
        return cls(
            json=args.json,
            device=args.device,
            configs=tuple(args.configs),
            variants=tuple(args.variants),
            micro_batch=args.micro_batch,
            minutes=args.minutes,
            dry_run=args.dry_run,
            tiny=args.tiny,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE, after every row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (default: cuda)")
    parser.add_argument(
        "--configs",
        nargs="+",
        choices=CONFIGS,
        default=CONFIGS,
        metavar="NAME",
        help=f"some of {', '.join(CONFIGS)} (default: all)",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="NAME",
        help=f'such as "{NAMES[0]}" and "{NAMES[1]}" (default: all)',
    )
    parser.add_argument(
        "--micro-batch",
        type=positive_int,
        metavar="N",
        help="samples of a step, the same for all configurations (default: one number for each configuration)",
    )
    parser.add_argument(
        "--minutes",
        type=positive_number,
        default=MINUTES,
        metavar="M",
        help=f"begin no row that would not end by then (default: {MINUTES})",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the rows and what each is planned to need, and run nothing; no GPU is needed",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="use models and batches that are small enough for a CPU; the figures then mean nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Measure the rows and print them. Without CUDA, say so and check nothing.

    Returns exit code 0 if every row was measured and every goal was reached, else 1.
    """
    started = time.perf_counter()
    options = CheckOptions.from_args(args)
    found = detect()
    if found is not None and found.world_size > 1:
        raise LaunchError(
            f"sdp gpu-check measures one rank, but {found.source} started {found.world_size}; start it without a "
            "launcher"
        )
    jobs = {
        row: job_of(row, micro_batch=options.micro_batch, tiny=options.tiny)
        for row in rows(options.configs, options.variants)
    }
    if not jobs:
        raise ConfigError(f"--variants: {', '.join(options.variants)} is of no configuration but {CONFIGS[0]}")
    # Plans are made in further processes while the GPU works. A CPU has no cores to spare for them.
    workers = 0 if options.tiny else min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // 2))
    if options.dry_run and options.json is not None:
        raise ConfigError("--json: has no effect with --dry-run, which measures nothing; leave one out")
    if options.dry_run:
        return _list(jobs, workers, options.device)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "sdp gpu-check: torch finds no CUDA device here; nothing was checked (--device cpu --tiny shows that the "
            "command works)"
        )
        write_report(options.json, {"skipped": "no CUDA device"})
        return 0
    if options.device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "--device cpu: the engine takes the GPU where there is one; hide it with CUDA_VISIBLE_DEVICES="
        )
    if options.device == "cpu" and not options.tiny:
        raise ConfigError("--device cpu: the models are too large for a CPU; add --tiny")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    with Plans(jobs, workers, options.device) as plans:
        check = _begin(options, device)
        check.go(
            jobs,
            plans.of,
            lambda job: measure(job, device, tiny=options.tiny),
            lambda: 60 * options.minutes - time.perf_counter() + started,
        )
    return check.conclude()


def _list(jobs: Mapping[Row, Job], workers: int, device: Device) -> int:
    with Plans(jobs, workers, device) as plans:
        for row, job in jobs.items():
            plan = plans.of(row)
            print(
                f"{row.config:<12}{row.name:<30}{job.config['train_micro_batch_size_per_gpu']:3} x {job.sequence} "
                f"tokens  state {format_bytes(plan.state_bytes, 'GiB'):>10}  peak "
                f"{format_bytes(plan.peak_memory_bytes, 'GiB'):>10}  {plan.flops / 1e12:7.1f} TFLOP a step",
                flush=True,
            )
    return 0


def _begin(options: CheckOptions, device: torch.device) -> Check:
    """Measure the rate of matrix products, and print how to read the figures."""
    rate = matmul_rate(device, TINY_MATMUL if options.tiny else MATMUL)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
    nominal = NOMINAL_TFLOPS.get(name)
    settings = {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "groups": GROUPS,
        "tiny": options.tiny,
        "bf16_matmul_flops_per_second": rate,
        "nominal_flops_per_second": nominal and nominal * 1e12,
        "operations": COUNTED,
        "collectives": "return at once: tokens/s are an upper bound",
    }
    data_sheet = f" of {nominal:g} in its data sheet" if nominal else ""
    print(f"{name}, torch {torch.__version__}; bf16 matrix products, sustained: {rate / 1e12:.1f} TFLOP/s{data_sheet}")
    print(
        f"One rank of {GROUPS}; the others exist in name only: collectives return at once, so tokens/s are an upper "
        "bound."
    )
    print(f"Operations, for MFU and for the bound: {COUNTED}.", flush=True)
    return Check(settings, rate, nominal and nominal * 1e12, options.json, options.tiny, device)
