"""``python -m lab.gradient_bias CONFIG``: SDP's gradient against the dense model's."""
