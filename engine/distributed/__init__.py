"""The mesh of ranks (sdp, fsdp, tp), process groups, and collectives between ranks."""
