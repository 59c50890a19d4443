"""The one layer between groups: it averages gradients among holders, refreshes frozen copies and compares holders."""
