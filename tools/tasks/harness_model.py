"""The full model as the harness sees a model. This file needs the package lm-eval."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...data.tokenizers import Tokenizer
from ...data.tokenizers.kinds import HuggingFaceTokenizer
from .scoring import Request, Scorer

log = logging.getLogger("sdp")


class HarnessModel(TemplateLM):
    """Answers the harness's requests for log-likelihoods.

    Texts become tokens as in the harness's own class for models of transformers, so an exported
    model gets the same scores.
    """

    def __init__(self, scorer: Scorer, text: Tokenizer):
        super().__init__()
        self._scorer, self._text, self._warned = scorer, text, False

    @property
    def eot_token_id(self) -> int:
        return self._text.end_of_text

    @property
    def prefix_token_id(self) -> int:
        text = self._text
        return text.begin_of_text if isinstance(text, HuggingFaceTokenizer) else text.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of ``string``. A tokenizer of transformers may add a first token."""
        if isinstance(self._text, HuggingFaceTokenizer):
            return self._text.encode_prompt(string, add_special_tokens=add_special_tokens)
        return self._text.encode(string)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding gives it."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each whole text, in windows that the model can read."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._scorer.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Raise NotImplementedError. Tasks that generate text are refused when they are loaded."""
        raise NotImplementedError("text is not generated during training")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self._scorer.score([self._request(*request[1:]) for request in requests])
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def _request(self, context: list[int], continuation: list[int]) -> Request:
        """Cut the oldest tokens off a request that the model cannot read as a whole."""
        most = self._scorer.max_length
        if len(continuation) > most and not self._warned:
            self._warned = True
            log.warning(
                "evaluate_tasks: a continuation has %d tokens, and the model reads %d; only its last tokens are scored",
                len(continuation),
                most,
            )
        ids = (context + continuation)[-(most + 1) :]
        return Request(ids, min(len(continuation), len(ids) - 1))
