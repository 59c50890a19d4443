"""The files of a checkpoint and of a directory of checkpoints."""
