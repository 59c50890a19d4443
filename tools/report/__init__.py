"""``sdp report``: runs compared."""
