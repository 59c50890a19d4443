"""``sdp gpu-check``: what plans promise, measured on a GPU."""
