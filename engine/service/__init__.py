"""The service of a run whose groups come and go (``sdp.sync.service``), and how groups use it.

The service keeps the anchors: the full model's weights after the last average. It does not depend
on how a group trains. A group uses the service only through ``steps``.
"""
