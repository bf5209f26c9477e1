"""`check_rule`: rules against autograd, sympy and their own defaults."""
