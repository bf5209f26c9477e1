"""bpk: more out of every backward pass."""
