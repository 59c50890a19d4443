"""Reads environment variables, such as this process's rank. No other package reads them."""
