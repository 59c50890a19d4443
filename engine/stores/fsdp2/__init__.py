"""The native store: FSDP2 inside a group, or plain parameters where nothing is sharded or cast."""
