"""What is inside a group: this rank's share of the group's subnetwork. It knows no other group."""
