"""The service of a run whose groups come and go (``sdp.sync.service``), and the groups' side."""
