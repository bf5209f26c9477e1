"""Products with the Hessian, the GGN and Jacobians by automatic differentiation alone: no matrix, no extension."""
