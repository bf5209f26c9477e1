"""Derivatives in the input, forward: Taylor coefficients travel with the values through a forward pass."""
