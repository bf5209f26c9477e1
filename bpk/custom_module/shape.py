"""Other shapes."""

from bpk.custom_module import generated

Reshape = generated("Reshape")
Squeeze = generated("Squeeze")
Unsqueeze = generated("Unsqueeze")
