"""Stores: objects that hold one rank's share of its group's subnetwork, and train it."""
