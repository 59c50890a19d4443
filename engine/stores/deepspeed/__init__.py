"""The DeepSpeed store: DeepSpeed's ZeRO shards a group's state."""
