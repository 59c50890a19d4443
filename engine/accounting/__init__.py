"""Bytes and seconds: planned and counted."""
