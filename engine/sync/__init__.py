"""Everything between groups.

It averages gradients among holders, refreshes frozen copies and compares holders.
"""
