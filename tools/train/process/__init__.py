"""What concerns the process of a rank: its log file, and the signals that stop it."""
