"""The executable specification: all groups' workers in one process."""
