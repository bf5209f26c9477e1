"""What is active in a thread: contexts, and what `bpk` cannot work inside of."""
