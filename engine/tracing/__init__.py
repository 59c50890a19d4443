"""Runs one rank's step without data, to predict its peak memory, operations and bytes sent."""
