"""``sdp study``: experiments over many configurations."""
