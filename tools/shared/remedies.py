"""Settings that a user can change when memory does not suffice."""

from __future__ import annotations

from ...engine.config.schema import Config


def remedies(config: Config) -> list[str]:
    """Settings that lower memory and are not used yet, those that cost the least first."""
    found = []
    if config.activation_checkpointing.mode == "none":
        found.append('activation_checkpointing.mode "selective" or "full" (recomputes activations)')
    micro = config.train_micro_batch_size_per_gpu
    if micro is None or micro > 1:
        found.append("a smaller train_micro_batch_size_per_gpu with more gradient_accumulation_steps")
    if config.zero_optimization.stage < 3:
        found.append("zero_optimization.stage 3 with more ranks per group (shares the state among them)")
    if config.sdp.groups > 1 and not isinstance(config.sdp.placement, dict) and _lowest(config) < _capacity(config):
        found.append(
            f"an sdp.capacity below {_capacity(config):g} (down to {_lowest(config):g} with {config.sdp.groups} groups)"
        )
    if config.sdp.groups == 1:
        found.append("several sdp.groups with a capacity below 1")
    if config.compute_bytes == 4:
        found.append("bf16.enabled (halves activations)")
    if config.data.name is None:
        found.append("a shorter data.sequence_length")
    elif config.data.name == "folder":
        found.append("a smaller data.image_size")
    return found


def _capacity(config: Config) -> float:
    capacity = config.sdp.capacity
    return max(capacity) if isinstance(capacity, list) else capacity


def _lowest(config: Config) -> float:
    return 1 / config.sdp.groups
