"""``sdp plan``: memory, traffic and time of a run before it starts."""
