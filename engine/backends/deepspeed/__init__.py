"""DeepSpeed shards a group's state; everything that touches DeepSpeed is here."""
