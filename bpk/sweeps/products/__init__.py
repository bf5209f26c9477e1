"""Products with curvature blocks: nothing travels until the user multiplies."""
