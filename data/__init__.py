"""Data: text to tokens, token shards and image sets, without models or the training loop."""
