"""Columns on their way: the sweep that takes them from call to call, and in which form they travel."""
