"""Saves and loads checkpoints. A run with any number of ranks and groups can load them."""
