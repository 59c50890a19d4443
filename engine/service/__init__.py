"""The service that keeps the anchors of local steps, and its clients, the groups that come and go.

It knows nothing of how a group trains. A group knows the service only through ``steps``.
"""
