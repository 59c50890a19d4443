"""The modules of DeepSpeed that scripts import: ``sdp.comm``, ``sdp.zero``, ``sdp.ops.adam`` and
others.
"""
