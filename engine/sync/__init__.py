"""Communication between groups.

Averages gradients among holders, sends new weights to frozen copies, and compares holders.
"""
