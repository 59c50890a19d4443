"""``sdp gradient-bias CONFIG``: how far SDP's gradient is from the dense model's in expectation."""

from __future__ import annotations

import argparse
import json

from ...engine.config.load import load_config
from ...engine.errors import ConfigError
from ..runs.run_config import with_initial_model
from ..runs.saved_run import open_run
from .measure import in_one_process, measure
from .options import BiasOptions, add_arguments
from .plot import plot_bias
from .table import plot_points, table, to_json

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write table and plot. Raises :class:`SDPError` if it cannot."""
    options = BiasOptions.from_args(args)
    config = with_initial_model(load_config(options.config, options.settings))
    if config.sdp.groups == 1:
        raise ConfigError(
            "sdp.groups 1: the one group has the dense model's gradient; give several groups and a placement"
        )
    for option, path in (
        ("--out", options.out),
        ("--json", options.json and options.json.parent),
    ):  # before anything is measured
        try:
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{option} {path}: cannot be made a folder ({error.strerror})") from None
    if options.json is not None and options.json.is_dir():
        raise ConfigError(f"--json {options.json}: is a folder; name a file")
    saved = open_run(options.checkpoint) if options.checkpoint is not None else None
    measured = measure(in_one_process(config), options.out, options.batches, same_data=options.same_data, saved=saved)
    text = table(measured)
    print(text)
    (options.out / "gradient_bias.md").write_text(text + "\n", encoding="utf-8")
    picture = plot_bias(measured.by_batches, *plot_points(measured), options.out / "gradient_bias.png")
    print(f"\ntable and plot: {options.out}/gradient_bias.md, {picture}")
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(to_json(measured), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {options.json}: cannot be written ({error.strerror})") from None
    return 0
