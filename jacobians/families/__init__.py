"""Families of rules: a layer declares its structure, and the products follow."""
