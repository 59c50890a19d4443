"""What a DeepSpeed script calls before it has an engine, under DeepSpeed's own names and arguments."""

from __future__ import annotations
