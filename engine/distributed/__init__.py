"""Ranks, the mesh (sdp, fsdp, tp), its process groups, and what is sent between them."""
