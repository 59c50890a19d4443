"""Measurements that a page or a comment of the source names, to be repeated."""
