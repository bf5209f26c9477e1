"""Time and memory of every quantity, as ratios to plain forward and backward, beside the alternatives."""
