"""The algebra: what a rule is, families of rules, composition, symbolic derivation, checks."""
