"""Predicts and measures bytes of state and peak memory, and prints quantities for reports."""
