"""The service of a run whose groups come and go (``sdp.sync.service``), and the groups' side of it.

The service averages the groups' weights, and keeps the full model's weights after the last average
(the anchors). It does not matter to the service how a group trains. The engine uses this package
only through ``steps``.
"""
