"""Text to tokens: readers, tokenizers and memory-mapped token shards. Knows no model and no training loop."""
