"""Trains all groups of a run in one process and in one pass, to study placements quickly.

A step takes about as long as one of the dense model, for any number of groups. The simulator has no
processes, shards, checkpoints or traffic.
"""
