"""Products, quotients, powers and limits, entry by entry."""

from bpk.custom_module import generated

Product = generated("Product")
Quotient = generated("Quotient")
Maximum = generated("Maximum")
Minimum = generated("Minimum")
Power = generated("Power")
Exponential = generated("Exponential")
Clamp = generated("Clamp")
