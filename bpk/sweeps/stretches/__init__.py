"""Second derivatives of stretches: plain autograd between two recorded calls."""
