"""The study of facts: how many random facts a model can learn by heart in a given memory."""
