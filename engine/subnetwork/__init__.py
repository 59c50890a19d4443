"""Cuts, scales, initialises and compiles the part of the model that a group holds."""
