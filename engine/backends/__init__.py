"""One package per backend; construct.py chooses between them."""
