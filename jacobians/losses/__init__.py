"""Loss functions: square roots of their Hessians, and products with these."""
