"""Batch arithmetic, how a model is called with a batch, and data loaders that resume."""
