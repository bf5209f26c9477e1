"""What a rule is: calls, bindings, the interface, the registry."""
