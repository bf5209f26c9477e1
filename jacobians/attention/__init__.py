"""Scaled dot-product attention, as a function and as a layer."""
