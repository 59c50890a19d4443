"""The native store: FSDP2 inside a group, or plain parameters if nothing is sharded or cast."""
