"""Kills groups and the service of a run, and checks that the run survives."""
