"""Names under which clients look for the derivatives of single layers."""
