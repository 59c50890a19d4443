"""The training loop: the same engine calls that a user's own script makes, with data, evaluation, metrics and saving around them."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...engine.accounting.clock import clock
from ...engine.accounting.memory import PeakMemory
from ...engine.accounting.memory_probe import peak_tensor_bytes
from ...engine.batch.call import loss_of, to_device
from ...engine.batch.loader import evaluation_batches
from ...engine.checkpoint.files import latest, locate
from ...engine.config.schema import Config
from ...engine.engine import SDPEngine
from ...engine.errors import CheckpointError, ConfigError, DivergedError
from ...engine.full_model.recalibration import tracks_statistics
from ...launcher.heartbeat import Heartbeat
from ..report.command import render
from ..runs.dataset import Corpus
from ..runs.plot import plot_loss
from ..runs.run_files import RunFiles, read_run
from .monitors import Monitors, evaluation_scalars, train_scalars
from .profiler import StepProfiler
from .progress import Progress, progress
from .summary import StepFacts, rank_facts, run_summary

log = logging.getLogger("sdp")

PROBED_STEP = 2  # the first step allocates optimizer state; from the second on, every step is like the others


class Trainer:
    """One rank's run. ``baseline``: bytes resident before the model existed; ``files`` and ``monitors`` exist on rank 0 alone."""

    def __init__(
        self,
        config: Config,
        engine: SDPEngine,
        corpus: Corpus,
        dump_dir: Path,
        baseline: int,
        beat: Heartbeat,
        files: RunFiles | None,
        monitors: Monitors | None,
    ):
        self.config, self.engine, self.corpus, self.dump_dir = config, engine, corpus, dump_dir
        self.beat, self.files, self.monitors = beat, files, monitors
        self.baseline_memory = baseline
        self.memory = PeakMemory(engine.device)
        self.tokens_per_step = engine.train_batch_size() * config.data.tokens_per_sample
        self.steps = 0
        training = config.training
        self.peak_tensors: int | None = None
        # Compiled code takes its memory where a CPU's probe does not see it.
        self._probes = engine.device.type == "cuda" or not training.compile
        # On CUDA the parts of a step are known only by waiting for the device, which wall_clock_breakdown asks for.
        self._times_parts = engine.device.type != "cuda" or config.wall_clock_breakdown
        self._clock = clock(engine.device, waits=config.wall_clock_breakdown)
        self._profiled: tuple[int, int] | None = None
        self._profiler: StepProfiler | None = None
        self.last_facts: StepFacts | None = None
        self._told_to_stop = 0  # the signal that this rank got
        self._stopping = 0  # the signal that all ranks agreed to stop for
        mesh, here = engine.layout.mesh, engine.data_ranks_here
        self.held_out = evaluation_batches(
            corpus.held_out,
            engine.train_micro_batch_size_per_gpu() * here,
            data_rank=mesh.data_rank(engine.global_rank),
            data_ranks=mesh.data_ranks // here,
            limit=training.evaluate_batches,
            collate_fn=corpus.collate_held_out,
            num_workers=config.data.num_workers,
        )
        self.calibration = self._calibration_batches()

    def _calibration_batches(self) -> list[Any]:
        """Training batches, not cropped or mirrored, that batch norm's statistics are measured on."""
        engine, limit = self.engine, self.config.training.recalibrate_batches
        if not limit or not tracks_statistics(engine.layout.buffers):
            return []
        mesh, here = engine.layout.mesh, engine.data_ranks_here
        micro, rank = engine.train_micro_batch_size_per_gpu() * here, mesh.data_rank(engine.global_rank)
        samples, workers = self.corpus.calibration or self.corpus.train, self.config.data.num_workers
        return list(
            evaluation_batches(
                samples, micro, rank, mesh.data_ranks // here, limit, self.corpus.collate_held_out, workers
            )
        )

    def _recalibrated(self) -> AbstractContextManager[None]:
        return self.engine.recalibrated(self.calibration) if self.calibration else nullcontext()

    def profile(self, steps: tuple[int, int] | None) -> None:
        """Record these steps (first and last, counted from where this process begins) on rank 0."""
        self._profiled = steps

    def train(self, *, resume: bool) -> int:
        """Run from the newest checkpoint (``resume``) or from the start to the last step. Returns the exit code."""
        if resume:
            self._resume()
        if self.files is not None:  # not before: a resume that fails leaves the run as it was
            self.files.write_config(self.config)
            self.files.write_placement(self.engine.layout.placement)
        start = self.engine.global_steps
        self.steps = self.config.training.steps or start + max(0, math.ceil(self._tokens_left() / self.tokens_per_step))
        if self._profiled is not None and self._profiled[1] > self.steps - start:
            raise ConfigError(
                f"--profile: {self._profiled[1]} steps are needed, but only {self.steps - start} are left; name earlier ones"
            )
        self._announce(start)
        bar = progress(self.steps, start, self.files is not None, self.config.steps_per_print)
        started = time.perf_counter()
        with self._finishing_on_signals():
            if start == 0:
                self._evaluate(bar)
            batches = iter(self.engine.loader)
            self._start_profile()
            while self.engine.global_steps < self.steps and not self._stopping:
                self._step_or_explain(batches, bar)
                self._after_step(bar)
                if self._profiler is not None:
                    self._profiler.step()
            self._settle(block=True)
            bar.close()
            if self._stopping and self.engine.global_steps < self.steps:
                self._write_checkpoint()
                log.info(
                    "stopped by %s after step %d, with a checkpoint",
                    signal.Signals(self._stopping).name,
                    self.engine.global_steps,
                )
                return 128 + self._stopping
        self._finish(time.perf_counter() - started)
        return 0

    @property
    def tokens(self) -> int:
        """Trained on since the start of the run, whatever the batch sizes were."""
        return self.engine.global_samples * self.config.data.tokens_per_sample

    def _tokens_left(self) -> int:
        return (self.config.training.tokens or 0) - self.tokens

    def _start_profile(self) -> None:
        if self._profiled is not None and self.files is not None:
            self._profiler = StepProfiler(*self._profiled, self.dump_dir / "profile", self.engine.device)
            self._profiler.start()

    # -- one step --------------------------------------------------------------------------------------------------------------

    def _step_or_explain(self, batches: Iterator[Any], bar: Progress) -> None:
        try:
            self._step(batches, bar)
        except DivergedError as error:
            self._settle(block=True)
            checkpoints = self.dump_dir / "checkpoints"
            newest = latest(checkpoints)
            last = locate(checkpoints, newest) if newest else "none was written"
            raise DivergedError(f"{error}; the last good one: {last}") from None

    def _step(self, batches: Iterator[Any], bar: Progress) -> None:
        self.memory.reset()
        self.engine.traffic.reset()
        learning_rate = self.engine.get_lr()[0]
        started = time.perf_counter()
        seconds: dict[str, float] = {}
        if self.engine.global_steps + 1 == PROBED_STEP and self._probes:
            probed = lambda: seconds.update(self._compute(batches))  # noqa: E731
            self.peak_tensors = peak_tensor_bytes(probed, self.engine.module, self.engine.optimizer, self.engine.device)
        else:
            seconds = self._compute(batches)
        loss = self.engine.get_loss()
        assert loss is not None
        self.last_facts = StepFacts(loss, learning_rate, self.memory.read(), self.engine.traffic.by_kind(), seconds)
        self._report_step(bar, started)

    def _compute(self, batches: Iterator[Any]) -> dict[str, float]:
        """Forward, backward and update over the step's micro-batches: the seconds of each part."""
        seconds = {"data_seconds": 0.0, "forward_seconds": 0.0, "backward_seconds": 0.0, "optimizer_seconds": 0.0}
        exposed = self.engine.exposed_reduction_seconds
        for _ in range(self.engine.gradient_accumulation_steps()):
            with self._timed(seconds, "data_seconds"):
                batch = to_device(next(batches), self.engine.device)
            with self._timed(seconds, "forward_seconds"):
                loss = loss_of(self.engine(batch))
            with self._timed(seconds, "backward_seconds"):
                self.engine.backward(loss)
            with self._timed(seconds, "optimizer_seconds"):
                self.engine.step()
        exposed = self.engine.exposed_reduction_seconds - exposed
        seconds["backward_seconds"] -= exposed
        return seconds | {"exposed_reduction_seconds": exposed}

    @contextmanager
    def _timed(self, seconds: dict[str, float], part: str) -> Iterator[None]:
        """Seconds of one part of the step, which also has its name in a profile."""
        training = self.config.training
        first = self.last_facts is None  # compiles, allocates, connects
        name = part.removesuffix("_seconds")
        self.beat.at(self.engine.global_steps + 1, name, training.start_timeout if first else training.step_timeout)
        started = self._clock()
        with torch.profiler.record_function(name):
            yield
        seconds[part] += self._clock() - started

    def _report_step(self, bar: Progress, started: float) -> None:
        """Gather what the ranks observed, and whether one was told to stop: then all do, after this step."""
        facts = self.last_facts
        assert facts is not None
        everyones = self.engine.gather_facts((facts.peak_memory_bytes, facts.comm, self._told_to_stop))
        self._stopping = max(told for _, _, told in everyones)
        elapsed = time.perf_counter() - started
        if self.files is None or self.monitors is None:
            return
        step = self.engine.global_steps
        busiest = max((comm for _, comm, _ in everyones), key=lambda comm: sum(comm.values()))
        line = {
            "step": step,
            "tokens": self.tokens,
            "samples": self.engine.global_samples,
            "loss": facts.loss,
            "grad_norm": self.engine.get_global_grad_norm(),
            "lr": facts.learning_rate,
            "tokens_per_second": self.tokens_per_step / elapsed,
            "samples_per_second": self.engine.train_batch_size() / elapsed,
            "step_seconds": elapsed,
            "peak_memory_bytes": max(peak for peak, _, _ in everyones),
            "comm_bytes": sum(busiest.values()),
            "comm_bytes_by_kind": busiest,
            "skipped_steps": self.engine.skipped_steps,
        }
        if self.engine.get_loss_scale() is not None:
            line["loss_scale"] = self.engine.get_loss_scale()
        self.files.step(line | facts.seconds if self._times_parts else line)
        self.monitors.write(step, train_scalars(line))
        bar.update(step, facts.loss, line["tokens_per_second"], {"grad_norm": line["grad_norm"], "lr": line["lr"]})

    # -- between steps ---------------------------------------------------------------------------------------------------------

    def _after_step(self, bar: Progress) -> None:
        training, step = self.config.training, self.engine.global_steps
        self._settle(block=False)
        if self._stopping and step < self.steps:
            return  # the grace time is short: save, and evaluate after the resume
        if step == self.steps or (training.evaluate_every and step % training.evaluate_every == 0):
            self._evaluate(bar)
        due = training.save_every and (step % training.save_every == 0 or step == self.steps)
        if due and not self.engine.was_step_skipped:  # such weights must not push out those of a good step
            self._save(background=training.async_save)

    def _evaluate(self, bar: Progress) -> None:
        self.beat.at(self.engine.global_steps, "evaluation", self.config.training.start_timeout)
        started = time.perf_counter()
        batches = list(self.held_out)
        own = self.engine.evaluate_subnetworks(batches)
        with self._recalibrated():
            loss = self.engine.evaluate(batches)
            measures = {
                name: self.engine.evaluate([{**batch, "measure": name} for batch in batches])
                for name in self.corpus.measures
            }
        if self.files is None or self.monitors is None:
            return
        step, mean_own = self.engine.global_steps, sum(own) / len(own)
        seconds = time.perf_counter() - started
        measures = measures or {"perplexity": math.exp(min(loss, 700.0))}
        facts = {"loss": loss, **measures, "subnetwork_losses": own, "seconds": seconds}
        self.files.evaluation({"step": step, "tokens": self.tokens, **facts})
        self.monitors.write(step, evaluation_scalars(facts))
        shown = f", accuracy {measures['accuracy']:.2%}" if "accuracy" in measures else ""
        bar.print(
            f"step {step}: held-out loss {loss:.4f}{shown} (full model), {mean_own:.4f} (mean of the groups' own subnetworks)"
        )

    def _save(self, *, background: bool) -> None:
        """Write a checkpoint. One that fails leaves the one before in place; the run goes on."""
        self._settle(block=True)
        try:
            self._write_checkpoint(background=background)
        except CheckpointError as error:
            log.error(
                "WARNING: no checkpoint at step %d: %s; the one before stays, the run goes on",
                self.engine.global_steps,
                error,
            )

    def _write_checkpoint(self, *, background: bool = False) -> None:
        self.beat.at(self.engine.global_steps, "checkpoint", self.config.training.save_timeout)
        with self._recalibrated():
            self.engine.save_checkpoint(
                self.dump_dir / "checkpoints",
                client_state=self.corpus.identity,
                keep=self.config.training.keep,
                background=background,
            )

    def _settle(self, *, block: bool) -> None:
        """Say how the save in the background went, if it failed."""
        if block:
            self.beat.at(self.engine.global_steps, "waiting for the checkpoint", self.config.training.save_timeout)
        try:
            self.engine.wait_for_checkpoint(block=block)
        except CheckpointError as error:
            log.error("WARNING: the last checkpoint was not written: %s; the one before stays, the run goes on", error)

    def _resume(self) -> None:
        self.beat.at(0, "loading the checkpoint", self.config.training.start_timeout)
        path, _ = self.engine.load_checkpoint(self.dump_dir / "checkpoints")
        if path is not None:
            log.info("resumed from %s", path)
        if self.files is not None:
            self.files.truncate_after(self.engine.global_steps if path is not None else -1)

    # -- signals ---------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _finishing_on_signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT, SIGHUP (unless ignored, as under nohup) and SIGUSR1 end the run after the step at hand, with a checkpoint.

        SIGUSR1 is what mpirun passes on to its ranks without ending them, and what SLURM users ask for before a time limit.
        """

        def remember(number: int, _: Any) -> None:
            self._told_to_stop = number

        numbers = [
            n
            for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
            if signal.getsignal(n) is not signal.SIG_IGN
        ]
        before = {number: signal.signal(number, remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- beginning and end -----------------------------------------------------------------------------------------------------

    def _announce(self, start: int) -> None:
        if self.files is None:
            return
        parameters = sum(info.numel for info in self.engine.layout.parameters.values())
        log.info(
            "model: %s, %.2f M parameters; data: %s",
            self.config.model["name"],
            parameters / 1e6,
            self.corpus.description,
        )
        kind = "tokens" if self.config.data.name is None else "images"
        log.info("training: steps %d to %d, %s %s a step", start + 1, self.steps, f"{self.tokens_per_step:,}", kind)
        if self.engine.world_size > 1:
            log.info("bytes sent between groups by this rank in a step: %s", self.engine.traffic_formula())
            planned = ", ".join(
                f"{kind.replace('/', ' ')} {sent:,}" for kind, sent in self.engine.planned_traffic().by_kind().items()
            )
            activations = (
                "; activations between tensor-parallel ranks come on top" if self.engine.layout.mesh.tp > 1 else ""
            )
            log.info("bytes sent by this rank in a step, planned: %s%s", planned, activations)
        if not self._probes:
            log.info("peak of live tensors: not measured, since on a CPU compiled code takes memory unseen")

    def _finish(self, seconds: float) -> None:
        self.beat.at(self.engine.global_steps, "the end", None)
        everyones = self.engine.gather_facts(
            rank_facts(self.engine, self.last_facts, self.baseline_memory, self.peak_tensors)
        )
        if self.files is None:
            return
        self.files.summary(run_summary(self.engine, self.corpus, self.dump_dir, everyones, seconds))
        finished = read_run(self.dump_dir)
        plot_loss([finished], self.dump_dir / "plots" / "loss.png")
        print(render([finished]))

    def close(self) -> None:
        """Flush and close what is written to."""
        if self._profiler is not None:
            self._profiler.close()
        if self.monitors is not None:
            self.monitors.close()
