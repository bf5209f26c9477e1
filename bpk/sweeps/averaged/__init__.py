"""Matrices, averaged over the batch, that travel in the place of columns."""
