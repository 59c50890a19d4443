"""The DeepSpeed backend: DeepSpeed shards a group's state. Only this package uses DeepSpeed."""
