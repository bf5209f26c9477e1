"""With which columns a sweep starts at a loss: square roots, signed columns, those of tokens, the outputs."""
