"""Which groups live, and what they have committed: the coordinator, and a rank's side of it."""
