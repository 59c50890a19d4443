"""Checkpoints under the full model's canonical names: any layout can write and read them."""
