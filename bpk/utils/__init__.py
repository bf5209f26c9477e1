"""Helpers around the extensions: flat vectors, Kronecker factors, samples, losses, and references to compare with."""
