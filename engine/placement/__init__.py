"""The units of a model, which group holds which unit, and the layout that all ranks agree on."""
