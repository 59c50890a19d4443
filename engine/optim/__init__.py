"""Optimizers, their parameter groups and state, learning-rate schedules, and clipping."""
