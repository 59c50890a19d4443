"""What watches the training loop: the hooks, and one file for each observer."""
