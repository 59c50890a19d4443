"""``sdp bench``: measures SDP and other ways to train, in turns on the same machine."""
