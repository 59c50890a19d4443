"""``sdp train CONFIG --check``: compares steps with plain torch, and holders with each other."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch.distributed as dist

from ...engine.check import TOLERANCE, check
from ...engine.config.schema import Config
from ...engine.distributed.heartbeat import Heartbeat
from ...engine.initialize import initialize
from ...models.registry import build_model
from ..runs.dataset import open_corpus

STEPS = 3


def check_run(config: Config, dump_dir: Path, beat: Heartbeat) -> int:
    """Compare steps of the engine with plain torch, and return 1 if weights differ. Collective.

    In the first comparison, every group holds the whole model. In the second, groups hold what the
    configuration says. At a capacity below 1, the second compares only holders with each other.
    """
    beat.at(0, "check", config.training.start_timeout)
    corpus, says = open_corpus(config, dump_dir), not dist.is_initialized() or dist.get_rank() == 0
    sdp = type(config.sdp)(groups=config.sdp.groups, engine=config.sdp.engine, seed=config.sdp.seed)
    wrong = False
    for name, section in (("every group holds the whole model", sdp), ("as configured", config.sdp)):
        engine, *_ = initialize(
            model=build_model(config.model, **corpus.facts),
            training_data=corpus.train,
            collate_fn=corpus.collate,
            config=config.model_copy(update={"sdp": section}).without_monitors(),
        )
        batches = itertools.islice(iter(engine.loader), STEPS * engine.gradient_accumulation_steps())
        found = check(engine, batches)
        lines = [f"{name}: {found.steps} steps; after each, holders have equal weights and optimizer state"]
        if found.difference is None:
            lines.append(f"{name}: not compared with plain torch: {found.why_not}")
        else:
            limit = TOLERANCE[config.precision]
            fails = found.difference > limit or (found.norm_difference or 0) > limit
            wrong |= fails
            verdict = "DIFFERS from" if fails else "equals"
            lines.append(
                f"{name}: {verdict} plain torch: weights differ by {found.difference:.1e} of their change (most in "
                f"{found.worst}), the gradient's norm by {found.norm_difference:.1e}"
            )
        if says:
            print(*lines, sep="\n", flush=True)
        if engine.calls is not None:
            engine.calls.stop()
    return int(wrong)
