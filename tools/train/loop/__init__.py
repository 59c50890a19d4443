"""What both training loops use: one rank's run, measurements, evaluations, checkpoints, summary."""
