"""Groups that come and go: a coordinator keeps membership and votes, and members form process
groups between them.
"""
