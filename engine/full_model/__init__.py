"""The full model from its parts: gathered, evaluated, and its batch-norm statistics."""
