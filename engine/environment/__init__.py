"""The rank, world size and host of this process. Only these files read environment variables."""
