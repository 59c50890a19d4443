"""The DeepSpeed store: DeepSpeed shards a group's state. Only this package uses DeepSpeed."""
