"""What a run is on disk: its files, data, checkpoints and plots."""
