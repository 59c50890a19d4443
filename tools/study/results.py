"""``results.json`` of a study: what its finished runs learned, in one small file.

A study can go on from this file on another machine, without the directories of its runs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ...engine.config.section import Section
from ...engine.errors import ConfigError
from ...engine.json_files import JsonError, read_json_file
from ..shared.files import refuse_link, write_own

RESULTS = "results.json"


class RunResult(Section):
    """What one run learned.

    Attributes:
        config: the digest of its configuration, without the place of the corpus.
        step: the number of its steps.
        loss: the held-out loss of the full model after the last step. None stands for NaN.
        least: the lowest held-out loss of all evaluations. None: it is ``loss``.
        seconds: how long it ran. None if an older version wrote the result.
    """

    config: str
    step: int
    loss: float | None
    least: float | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None

    def numbers(self) -> dict[str, float]:
        """The numbers of the last evaluation. The loss is infinite if it was NaN."""
        loss = math.inf if self.loss is None else self.loss
        known = {} if self.seconds is None else {"seconds": self.seconds}
        return {"step": self.step, "loss": loss, "least": loss if self.least is None else self.least, **known}


class _File(Section):
    corpus: str | None
    runs: dict[str, RunResult]


@dataclass(frozen=True)
class SavedResults:
    """The content of ``results.json``.

    Attributes:
        corpus: the digest of the corpus of all runs. None if runs make their own data.
        runs: the results by the names of the runs.
    """

    corpus: str | None
    runs: Mapping[str, RunResult]

    @classmethod
    def read(cls, out: Path) -> SavedResults | None:
        """Read the file in the folder ``out`` of a study. None if there is none.

        Raises ConfigError for a file that no study wrote.
        """
        path = out / RESULTS
        refuse_link(path)
        if not path.exists():
            return None
        try:
            found = _File.model_validate(read_json_file(path))
        except (JsonError, OSError, ValidationError) as error:
            reason = "a key is missing or wrong" if isinstance(error, ValidationError) else error
            raise ConfigError(f"{path}: is not a file of sdp study ({reason}); remove it") from None
        return cls(found.corpus, found.runs)

    def require_corpus(self, digest: str | None, out: Path) -> None:
        """Raise ConfigError if these results are of another corpus than ``digest``."""
        if self.runs and self.corpus != digest:
            raise ConfigError(
                f"{out / RESULTS}: its runs learned from another corpus than this study would; name another folder, "
                "or remove the file"
            )

    def write(self, out: Path) -> None:
        """Write the file."""
        runs = {name: result.model_dump() for name, result in sorted(self.runs.items())}
        write_own(out / RESULTS, json.dumps({"corpus": self.corpus, "runs": runs}, indent=0) + "\n")


def config_digest(config: Mapping[str, Any]) -> str:
    """The SHA-256 of a configuration, whose corpus may be anywhere."""
    data = config.get("data")
    if isinstance(data, Mapping):
        config = {**config, "data": {key: value for key, value in data.items() if key != "path"}}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def corpus_digest(corpus: Path | None) -> str | None:
    """The SHA-256 of what a corpus holds: its index has the digests of its shards.

    None if there is no corpus. Raises ConfigError for a corpus without an index.
    """
    if corpus is None:
        return None
    try:
        splits = read_json_file(corpus / "index.json")["splits"]
    except (JsonError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"{corpus}: is not a corpus ({error}); remove it, and it is prepared again") from None
    return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()
