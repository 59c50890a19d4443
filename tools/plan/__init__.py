"""``sdp plan``: the memory, traffic and time of a run, before the run starts."""
