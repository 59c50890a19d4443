"""Starts the processes of a run, on this host or on many hosts."""
