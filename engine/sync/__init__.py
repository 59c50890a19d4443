"""The one layer between groups: gradients averaged among holders, frozen copies refreshed, holders compared."""
