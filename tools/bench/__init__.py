"""``sdp bench``: what SDP costs and saves, measured in interleaved runs."""
