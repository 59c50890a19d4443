"""``sdp gradient-bias``: SDP's gradient against the dense model's."""
