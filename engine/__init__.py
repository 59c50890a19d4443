"""The engine: subnetworks in groups, trained together."""
