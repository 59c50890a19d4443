"""Reads environment variables, such as this process's rank. The rest of the engine reads none."""
