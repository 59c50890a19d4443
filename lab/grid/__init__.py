"""``python -m lab.grid GRID OUT``: train the cells of a table, each over several seeds."""
