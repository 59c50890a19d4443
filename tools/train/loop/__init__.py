"""Parts of the training loop: measurements, evaluations, checkpoints and the summary of a run."""
