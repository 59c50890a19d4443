"""The service that keeps the anchors of local steps, and its clients, the groups that come and go.

It does not depend on how a group trains. A group uses the service only through ``steps``.
"""
