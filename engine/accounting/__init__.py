"""Predicts and measures bytes of state, measures peak memory, and formats quantities."""
