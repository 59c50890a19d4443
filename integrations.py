"""``sdp.integrations``: Accelerate, and the Trainer of transformers."""

from .engine.integrations import install as install
