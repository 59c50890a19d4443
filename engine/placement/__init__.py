"""Finds the units of a model, and decides which group holds which unit."""
