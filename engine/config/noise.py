"""Gradient noise: a profile of holders that follows from it, and with what it cannot be
measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError
from .section import PathText, PositiveInt, Section


class NoiseProfile(Section):
    """Holders by gradient noise: more for units whose gradients are noisy for their size.

    ``noise``: the metrics.jsonl, or the directory, of a run with ``training.noise_scale_interval``.
    ``preconditioned``: take the noise of gradients that are divided by the root of Adam's second
    moments. ``holders``: the result, which config.json of a run has. Then no file is read.
    """

    noise: PathText
    preconditioned: bool = False
    holders: list[PositiveInt] | None = None


def refuse_to_measure(groups: int, engine: str, others: Mapping[str, bool], *, recomputes: bool) -> None:
    """Raise ConfigError if the noise cannot be measured.

    Args:
        groups: the number of SDP groups.
        engine: ``sdp.engine``.
        others: other settings that exclude it, and whether they are used.
        recomputes: whether activations are recomputed.
    """
    reasons = {
        "compares the gradients of holders, and sdp.groups is 1; use 2 groups or more": groups < 2,
        **{
            f"needs an average of gradients in every step, which {key} does not make; use 0, or remove {key}": is_used
            for key, is_used in others.items()
        },
        'is not available with sdp.engine "vectorized"; use "reference"': engine == "vectorized",
        f'is not available with sdp.engine "{engine}" and activation_checkpointing; use mode "none"': recomputes
        and engine == "reference",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"training.noise_scale_interval: the measurement {reason}")
