"""``sdp advise``: which way to train a model is expected to be best on given machines."""
