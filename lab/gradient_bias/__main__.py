"""``python -m lab.gradient_bias CONFIG OUT``: the bias of SDP's gradient.

The bias is how far SDP's gradient is from the dense model's in expectation.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError, SDPError
from sdp.tools.runs.saved_run import CheckpointChoice, use
from sdp.tools.runs.start_files import with_initial_model

from .estimate import FEWEST
from .measure import measure
from .report import plot, table, to_json


def main(argv: list[str] | None = None) -> int:
    """Measure the bias, print the table, and write table, figures and plot."""
    parser = argparse.ArgumentParser(prog="python -m lab.gradient_bias", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the JSON file of a run: model, placement and data")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of table, figures and plot")
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", default=[], help="change keys of CONFIG")
    parser.add_argument("--checkpoint", metavar="RUN", type=Path, help="take weights and data of this run")
    parser.add_argument("--batches", metavar="N", type=int, default=16, help="independent batches (default: 16)")
    parser.add_argument("--same-data", action="store_true", help="every group reads the same rows")
    args = parser.parse_args(argv)
    try:
        if args.batches < FEWEST:
            raise ConfigError(f"--batches {args.batches}: at least {FEWEST} are needed to tell bias from noise")
        config = with_initial_model(load_config(args.config, args.set))
        if config.sdp.groups == 1:
            raise ConfigError("sdp.groups 1: the one group has the dense model's gradient; give several groups")
        args.out.mkdir(parents=True, exist_ok=True)
        saved = use(CheckpointChoice(args.checkpoint), lambda saved: saved) if args.checkpoint is not None else None
        measured = measure(config, args.out, args.batches, same_data=args.same_data, saved=saved)
    except (SDPError, OSError) as error:
        print(f"lab.gradient_bias: error: {error}", file=sys.stderr)
        return 2
    text = table(measured)
    print(text)
    (args.out / "results.md").write_text(text + "\n", encoding="utf-8")
    (args.out / "results.json").write_text(json.dumps(to_json(measured), indent=1) + "\n", encoding="utf-8")
    plot(measured, args.out / "plot.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
