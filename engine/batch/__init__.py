"""Batch sizes, calls of a model with a batch, and data loaders whose position can be saved."""
