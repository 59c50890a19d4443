"""Bytes of state, predicted and measured; peak memory; the clock of a step."""
