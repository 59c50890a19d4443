"""The FSDP2 store: FSDP2 shards a group's state."""
