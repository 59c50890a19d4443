"""The engine's seconds per step against those of a hand-written loop."""
