"""Traces one rank's step on fake tensors: peak memory by kind, operations, and bytes sent."""
