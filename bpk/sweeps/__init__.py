"""What travels backwards along the calls of a plan."""
