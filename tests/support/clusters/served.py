"""A run with a service on host-a, whose groups are started one by one."""

import json
import subprocess
from typing import Any

from sdp.tests.support.clusters.hosts import PAUSE, SDP, Hosts, finish
from sdp.tests.support.processes import until, written_lines

SECONDS = 500.0  # the limit for the whole run, which takes less than a minute on idle cores
# Many steps, because the run must last until a group is back. A group is dropped after 16 s.
SERVICE = {"heartbeat_seconds": 8, "grace_seconds": 60}
SETTINGS = ["--set", f"sdp.sync={json.dumps({'every': 4, 'service': SERVICE})}", "training.save_every=0"]
SETTINGS += ["training.steps=800", "gradient_accumulation_steps=4", "training.step_timeout=600"]


class ServedRun:
    """The service, and the words that start a group."""

    def __init__(self, hosts: Hosts, run: str, port: int):
        self.hosts, self.run, address = hosts, run, f"10.77.0.1:{port}"
        (hosts.folder / "token").write_text("0123456789abcdef")
        words = ["small.json", *SETTINGS, "--token-file", "token"]
        serve = [*SDP, "serve", *words, "--bind", address, "--dump-dir", run]
        self.group = [*SDP, "train", *words, "--service", address, "--dump-dir"]
        self.service = hosts.start(*serve, log=f"{run}.log")

    def said(self) -> str:
        """Return what the service has logged."""
        return (self.hosts.folder / f"{self.run}.log").read_text()

    def rounds(self) -> list[dict[str, Any]]:
        return written_lines(self.hosts.folder / self.run / "metrics.jsonl")

    def reach(self, *, groups: int, count: int = 3) -> None:
        """Wait for ``count`` more rounds in which ``groups`` groups take part."""
        before = len(self.rounds())

        def look() -> bool:
            assert self.service.poll() is None, self.said()
            return sum(line["groups"] == groups for line in self.rounds()[before:]) >= count

        until(look, SECONDS, PAUSE)

    def check_end(self, groups: list[subprocess.Popen[str]]) -> None:
        """Wait for the end, and check that no sample was counted twice, or lost without a word."""
        assert finish(self.service, SECONDS) == 0, self.said()
        assert [finish(group, 60) for group in groups] == [0] * len(groups)
        assert self.rounds()[-1]["step"] == 800
        folder = self.hosts.folder / self.run
        order, summary = (json.loads((folder / f"{name}.json").read_text()) for name in ("data_order", "summary"))
        dealt = order["first"] * order["groups"] + sum(map(len, order["dealt"].values()))
        assert summary["samples"] + summary["skipped_samples"] == dealt * order["micro_batches"] * order["width"]
