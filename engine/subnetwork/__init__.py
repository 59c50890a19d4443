"""The part of the model that a group holds: carved or sliced, scaled, initialised and compiled."""
