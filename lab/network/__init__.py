"""Hosts on this machine with links of a given rate, and a command that runs its ranks on them."""
