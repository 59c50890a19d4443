"""The laboratory: studies of what SDP costs and learns, and the programs that make them.

It is not installed. Run it in a checkout, for example ``python -m lab.grid GRID OUT``. It may
import all of ``sdp``, and nothing of ``sdp`` imports it.
"""
