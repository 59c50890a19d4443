"""Data: text to tokens, token shards and image sets. It does not know models or the training loop."""
