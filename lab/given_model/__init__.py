"""Continued training of a given model: SDP against full training, LoRA, BAdam and few blocks."""
