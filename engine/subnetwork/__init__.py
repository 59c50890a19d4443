"""The part of the model that a group holds: how it is cut, scaled, initialised and compiled."""
