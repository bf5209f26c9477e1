"""Pages of the documentation that are generated: from the registry, docstrings, runs, and stored results."""
