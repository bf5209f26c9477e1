"""Autograd's graph, as records see it: its nodes, who owns them, and how a call is connected to them."""
