"""Tasks of lm-evaluation-harness (EleutherAI) on the full model, in training and afterwards."""
