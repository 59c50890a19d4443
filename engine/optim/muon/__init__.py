"""Muon for matrices: the algorithm, and which parameters it gets."""
