"""The inside of a group: this rank's share of the subnetwork, without other groups."""
