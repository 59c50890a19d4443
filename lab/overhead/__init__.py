"""Compares the engine's seconds per step with those of a hand-written loop."""
