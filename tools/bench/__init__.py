"""``sdp bench``: measures what SDP costs and saves, in interleaved runs."""
