"""Second derivatives that nobody has declared: their structure, and signed columns of them."""
