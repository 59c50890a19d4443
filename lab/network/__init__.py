"""Makes hosts on this machine with links of a given rate, and runs a command's ranks on them."""
