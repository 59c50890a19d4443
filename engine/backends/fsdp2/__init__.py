"""The native backend: FSDP2 inside a group."""
