"""The engine of SDP: trains subnetworks of one model in groups of ranks."""
