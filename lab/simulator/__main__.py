"""``python -m lab.simulator CONFIG OUT``: train one configuration, all groups in one process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sdp.engine.config.load import load_config
from sdp.engine.errors import SDPError

from .training import train


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.simulator", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the JSON file of a run")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of result.json")
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", default=[], help="change keys of CONFIG")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        result = train(load_config(args.config, args.set), args.out)
    except (SDPError, OSError) as error:
        print(f"lab.simulator: error: {error}", file=sys.stderr)
        return 2
    print(f"loss of the full model on held-out data: {result['evaluations'][-1]['loss']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
