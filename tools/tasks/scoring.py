"""Computes log-likelihoods of tokens with the full model. All ranks share the work.

The harness runs on rank 0 only. The other ranks wait for the tokens that it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...engine.batch.call import logits_of
from ...engine.distributed.agreement import gather_json
from ...engine.engine import SDPEngine
from ...engine.model_interface import get_config

T = TypeVar("T")

BATCHES = 32  # batches of a rank between two signs of progress


class Request(NamedTuple):
    """Tokens of which the last ``scored`` ones are scored, given those before them."""

    ids: list[int]
    scored: int


class Score(NamedTuple):
    """The log-likelihood of a request in nats, and whether greedy decoding would give its
    tokens.
    """

    log_likelihood: float
    is_greedy: bool


@dataclass(frozen=True)
class FullModel:
    """What is needed of an engine, or of a backend, to score tokens.

    Attributes:
        module: The module that ``evaluate`` calls with each batch.
        evaluate: Runs the full model on batches with their weights. Collective.
        max_length: The tokens that the model can read.
        micro: The requests of a batch.
        device: The device of this rank.
        share: This rank's share of the requests.
        shares: The number of shares. Tensor-parallel ranks have the same one.
        multiple: A batch's length must be divisible by this.
        reports: Whether this rank reports the scores of its share.
    """

    module: nn.Module
    evaluate: Callable[[list[Any], list[float]], float]
    max_length: int
    micro: int
    device: torch.device
    share: int = 0
    shares: int = 1
    multiple: int = 1
    reports: bool = True

    @classmethod
    def of_engine(cls, engine: SDPEngine) -> FullModel:
        """Describe the full model of ``engine``."""
        mesh = engine.layout.mesh
        return cls(
            engine.module,
            engine.evaluate,
            max_length(engine.module, engine.config.data.sequence_length, mesh.tp),
            engine.train_micro_batch_size_per_gpu(),
            engine.device,
            mesh.data_rank(engine.global_rank),
            mesh.data_ranks,
            mesh.tp,
            mesh.coordinates(engine.global_rank).tp == 0,
        )


def max_length(module: nn.Module, sequence_length: int, multiple: int = 1) -> int:
    """Return the tokens that the model can read, as the harness finds them in an exported model."""
    config = get_config(module)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return (limit or sequence_length) // multiple * multiple


class Scorer:
    """Scores requests. Rank 0 calls :meth:`lead`, and all other ranks call :meth:`follow`."""

    def __init__(self, model: FullModel, on_progress: Callable[[], None] = lambda: None):
        """``on_progress`` is called from time to time on every rank."""
        self._model, self._on_progress = model, on_progress
        self._is_scoring = False

    @property
    def max_length(self) -> int:
        """The tokens that the model can read."""
        return self._model.max_length

    def lead(self, work: Callable[[], T]) -> T:
        """Call ``work``, which may call :meth:`score`, and release the other ranks afterwards."""
        try:
            return work()
        finally:
            # After a failure inside a collective, the others do not listen.
            if not self._is_scoring:
                self._broadcast(None)

    def follow(self) -> None:
        """Compute this rank's share until rank 0 has finished its work."""
        while (requests := self._broadcast([])) is not None:
            self._score(requests)

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the scores of ``requests``, in their order. Rank 0 calls it inside
        :meth:`lead`.
        """
        if not requests:
            return []
        # Batches of similar lengths need little padding.
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].ids))
        self._is_scoring = True
        values = self._score(self._broadcast([requests[index] for index in order]) or []).tolist()
        self._is_scoring = False
        scores = {index: Score(total, bool(greedy)) for index, (total, greedy) in zip(order, values, strict=True)}
        return [scores[index] for index in range(len(requests))]

    def _score(self, requests: Sequence[Request]) -> torch.Tensor:
        """Return log-likelihood and greediness of all requests, shape (requests, 2). Collective."""
        model, values = self._model, torch.zeros(len(requests), 2, dtype=torch.float64)
        block = model.shares * model.micro * BATCHES
        for start in range(0, len(requests), block):
            self._on_progress()
            indices = range(start, min(start + block, len(requests)))
            mine = indices[model.share :: model.shares]
            # Every rank computes as many batches as the one with the largest share.
            batches = -(-len(indices[:: model.shares]) // model.micro)
            parts = [mine[number * model.micro : (number + 1) * model.micro] for number in range(batches)]
            found = self._run([[requests[index] for index in part] for part in parts])
            for part, scores in zip(parts, found, strict=True):
                for index, score in zip(part, scores, strict=True):
                    values[index] = torch.tensor(score, dtype=torch.float64)
        if self._is_distributed:
            values = (values if model.reports else torch.zeros_like(values)).to(model.device)
            dist.all_reduce(values)
        return values

    def _run(self, batches: Sequence[Sequence[Request]]) -> list[list[Score]]:
        """Score batches of requests with one evaluation of the full model. Collective."""
        inputs = [self._padded(requests) for requests in batches]
        found: list[list[Score]] = []

        def read(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> torch.Tensor:
            index = len(found)  # batches finish in their order
            assert torch.equal(kwargs["input_ids"].cpu(), inputs[index]["input_ids"])
            found.append([_score_row(logits_of(output)[row], request) for row, request in enumerate(batches[index])])
            return torch.zeros((), device=self._model.device)  # in place of a loss

        handle = self._model.module.register_forward_hook(read, with_kwargs=True)
        try:
            with torch.no_grad():
                self._model.evaluate(inputs, [1.0] * len(inputs))
        finally:
            handle.remove()
        return found

    def _padded(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        longest = max((len(request.ids) - 1 for request in requests), default=1)
        width = -(-longest // self._model.multiple) * self._model.multiple
        ids = torch.zeros(max(1, len(requests)), width, dtype=torch.int64)
        for row, request in zip(ids, requests, strict=False):
            row[: len(request.ids) - 1] = torch.tensor(request.ids[:-1])
        return {"input_ids": ids}

    @property
    def _is_distributed(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1

    def _broadcast(self, requests: Sequence[Request] | None) -> Sequence[Request] | None:
        """Return rank 0's ``requests`` on every rank. None says that there are no more.
        Collective.
        """
        if not self._is_distributed:
            return requests
        found = gather_json(requests)[0]
        return None if found is None else [Request(*request) for request in found]


def _score_row(logits: torch.Tensor, request: Request) -> Score:
    end = len(request.ids) - 1
    likely = logits[end - request.scored : end].float().log_softmax(-1)
    wanted = torch.tensor(request.ids[-request.scored :], device=likely.device)
    total = likely.gather(1, wanted[:, None]).double().sum().item()
    return Score(total, bool((likely.argmax(-1) == wanted).all()))
