"""Evaluates, gathers and copies the full model, of which each group has only a part."""
