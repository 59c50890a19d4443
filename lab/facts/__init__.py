"""Facts by heart: how much a model can learn in a given memory."""
