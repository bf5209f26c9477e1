"""`bpk.cost`: time and memory of a pass before it runs."""
