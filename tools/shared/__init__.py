"""Helpers that know nothing of a run."""
