"""Who am I: rank, world size and host. These files are the only readers of environment variables."""
