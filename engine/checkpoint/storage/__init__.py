"""Reads and writes the files of a checkpoint, in a directory or an object store."""
