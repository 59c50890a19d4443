"""Checkpoints under the canonical names of the full model: any layout writes them and any layout reads them."""
