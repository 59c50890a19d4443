"""``sdp serve CONFIG``: the service of a run whose groups come and go, and the files of the run."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import ssl
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ..engine.batch.loader import ResumableLoader
from ..engine.checkpoint.load import find, load
from ..engine.checkpoint.save import Saver
from ..engine.checkpoint.state import weights_of
from ..engine.config.load import load_config
from ..engine.config.schema import Config
from ..engine.construct import first_weights
from ..engine.distributed.mesh import Mesh
from ..engine.errors import CheckpointError, ConfigError, ModelError, NonFiniteError, ServiceError
from ..engine.files import write_whole
from ..engine.json_files import read_json_file
from ..engine.placement.layout import Layout
from ..engine.service.anchors import Anchors
from ..engine.service.rounds import ServedRun
from ..engine.service.server import Server
from ..launcher.signals import caught_signals
from ..models.registry import build_model
from .runs.dataset import open_corpus
from .runs.run_files import RunFiles, read_run
from .runs.start_files import keep_start_files, with_absolute_paths, with_initial_model
from .shared.arguments import add_config_arguments
from .train.loop.summary import write_summary
from .train.process import set_up_logging
from .train.service import encryption, read_token, settings_of, split_address

log = logging.getLogger("sdp")

_ORDER = "data_order.json"  # the state of the data order, which changes between checkpoints
_ROUND = "step %(step)d/%(steps)d  round %(round)d  loss %(loss).4f  groups %(groups)d of %(alive)d  late %(late)d"
_ROUND += "  skipped tokens %(skipped_tokens)d"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "the run's JSON file, with a section sdp.sync.service")
    parser.add_argument("--bind", metavar="HOST:PORT", required=True, help="address at which the service listens")
    parser.add_argument("--dump-dir", metavar="DIR", type=Path, required=True, help="the run's folder; its run goes on")
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="file with the secret (or SDP_SERVICE_TOKEN)")
    parser.add_argument("--tls-certificate", metavar="FILE", type=Path, help="encrypt with the certificates in FILE")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="file with the certificate's private key")


def run(args: argparse.Namespace) -> int:
    """Serve the groups until the run has ended, and return the exit code."""
    config = with_absolute_paths(with_initial_model(load_config(args.config, args.set)))
    if config.sdp.sync is None or config.sdp.sync.service is None:
        raise ConfigError(f'{args.config}: has no service; add "sdp": {{"sync": {{"every": 32, "service": {{}}}}}}')
    token, (host, port) = read_token(args.token_file), split_address(args.bind, "--bind")
    tls = encryption(args.tls_certificate, args.tls_key, serves=True)
    with closing(RunFiles(args.dump_dir, resume=True)) as files:
        set_up_logging(0, args.dump_dir)
        return _Service(config, files).serve(token, host, port, tls)


class _Service:
    def __init__(self, config: Config, files: RunFiles):
        self._config, self._files, self._dump_dir = config, files, files.dump_dir
        self._corpus = open_corpus(config, self._dump_dir)
        groups, sync, steps = config.sdp.groups, config.sdp.sync, config.training.steps
        assert sync is not None and steps is not None
        model = build_model(config.model, **self._corpus.facts)
        self._layout = Layout.of(model, config, Mesh(groups))
        blocks = tuple(f"{name}." for name in self._layout.blocks) if "forward" in config.sdp.maskings else ()
        buffers = [*self._layout.buffers, *(name for name, _ in model.named_buffers() if name.startswith(blocks))]
        if buffers:
            raise ModelError(f"{buffers[0]}: the service keeps no buffers; take another model, or no service")
        anchors = Anchors(self._layout, sync, first_weights(model, config, self._layout))
        momenta = {f"outer/{name}/momentum_buffer": value for name, value in anchors.momenta.items()}
        self._tensors = weights_of(anchors.weights) | momenta  # by key of a checkpoint; outer steps change them
        self._run = ServedRun(anchors, sync, steps, groups, config.data.tokens_per_sample)
        self._sampler = ResumableLoader(self._corpus.train, 1, data_ranks=groups, seed=config.training.seed).sampler
        self._saver, self._saved, self._started = Saver(alone=True, device=torch.device("cpu")), 0, time.monotonic()
        self._resume()
        files.write_config(config)
        keep_start_files(config, self._dump_dir)
        files.write_placement(self._layout.placement)

    def serve(self, token: bytes, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Serve until the run has ended or a signal comes. Returns the exit code."""
        run = self._run
        try:
            with caught_signals() as received:
                server = Server(run, token, settings_of(self._config), self._record)
                asyncio.run(server.serve(host, port, tls, received))
        except OSError as error:
            raise ConfigError(f"--bind {host}:{port}: cannot listen ({error.strerror}); give another address") from None
        self._save(block=True)
        self._saver.wait()
        if run.problem is not None:
            raise ServiceError(f"{run.problem}; the newest checkpoint: step {run.step}")
        if not run.has_ended:
            log.info("stopped after step %d; start the service again to continue", run.step)
            return 128 + received[0]
        self._write_summary()
        return 0

    def _record(self, kind: str, line: dict[str, Any]) -> None:
        """Write what the server reports, and save a checkpoint after each round."""
        if kind == "order":
            write_whole(self._dump_dir / _ORDER, json.dumps(line))
        elif kind == "evaluation":
            self._files.evaluation(line)
            log.info("step %d: held-out loss %.4f (full model)", line["step"], line["loss"] or math.nan)
        else:
            self._files.step(line)
            loss = math.nan if line["loss"] is None else line["loss"]
            log.info(_ROUND, line | {"steps": self._run.schedule.steps, "loss": loss})
            if line["fragment"] == 0:
                self._save(block=False)

    def _save(self, *, block: bool) -> None:
        """Write a checkpoint in the background, after the last one (``block``) or not at all."""
        run, config = self._run, self._config
        try:
            if not self._saver.wait(block=block) or run.closed == self._saved:
                return
        except CheckpointError as error:
            log.error("WARNING: the last checkpoint was not written: %s; the previous one stays", error)
        self._saved = run.closed
        sync = {"outer_steps": run.closed, "steps_alone": 0, "under_way": None, "fragments": run.schedule.fragments}
        state = {
            "global_steps": run.step, "global_samples": run.samples, "skipped_steps": 0, "loss_scale": None,
            "mesh": [config.sdp.groups, run.data_ranks, 1], "learning_rates": {},
            "placement": self._layout.placement.to_json(),
            "settings": {"config": config.resolved(), "options": {}},
            "scheduler": {"last_batch_iteration": run.step - 1} if config.scheduler is not None else None,
            "loader": self._sampler.state_at(run.order.end if run.order is not None else 0),
            "client_state": {**self._corpus.identity, "service": run.state_dict()}, "spikes": {}, "sync": sync,
        }  # fmt: skip
        try:
            self._saver.save(
                self._dump_dir / "checkpoints", f"step-{run.step}", self._tensors, state,
                parameters=self._layout.wholes, background=True, keep=2,
            )  # fmt: skip
        except NonFiniteError as error:
            run.problem = str(error)  # groups learn it, and the newest checkpoint stays

    def _resume(self) -> None:
        run, order = self._run, self._dump_dir / _ORDER
        dealt = read_json_file(order) if order.exists() else None
        if (found := find(self._dump_dir / "checkpoints", None)) is None:
            run.load_state_dict(None, dealt)
            self._files.truncate_after(-1)
            return
        path, state = found
        if "service" not in state["client_state"]:
            raise CheckpointError(f"{path}: was not written by a service; name another --dump-dir")
        load(path, self._tensors, state["files"], alone=True)
        run.load_state_dict(state["client_state"]["service"], dealt)
        self._saved = run.closed
        self._files.restart(run.step)
        self._files.truncate_after(run.step, outer_step=run.closed)
        log.info("continues from %s; %d samples count as skipped", path, run.skipped_samples)

    def _write_summary(self) -> None:
        run, seconds = self._run, time.monotonic() - self._started
        tokens = run.samples * run.tokens_per_sample
        parameters = sum(info.numel for info in self._layout.parameters.values())
        losses = [line.get("loss") for line in read_run(self._dump_dir).evaluations] or [None]
        summary = {
            "steps": run.step, "tokens": tokens, "samples": run.samples, "skipped_samples": run.skipped_samples,
            "late": run.late, "seconds": seconds, "tokens_per_second": tokens / seconds,
            "model": {"name": self._config.model["name"], "parameters": parameters},
            "layout": {"sdp": run.groups}, "held_out": {"before": losses[0], "after": losses[-1]}, "ranks": [],
        }  # fmt: skip
        write_summary(self._files, summary)
