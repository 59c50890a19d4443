"""``sdp report``: compares runs."""
