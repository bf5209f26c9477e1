"""Indexing behind the batch axis."""

from bpk.custom_module import generated

Slicing = generated("Slicing")
