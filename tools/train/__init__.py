"""``sdp train``: the command, one rank of a run, and the training loop."""
