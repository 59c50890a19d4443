"""The full model from its parts: gathering, evaluation, buffers and batch-norm statistics."""
