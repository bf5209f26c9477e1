"""Concatenation."""

from bpk.custom_module import generated

Concat = generated("Concat")
Stack = generated("Stack")
