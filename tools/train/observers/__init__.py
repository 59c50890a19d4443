"""Observers of the training loop: their hooks, and one file for each observer."""
