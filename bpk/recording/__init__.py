"""The forward pass: a record for each call of an extended layer."""
