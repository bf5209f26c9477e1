"""Scripts that check themselves against plain autograd (`make examples`)."""
