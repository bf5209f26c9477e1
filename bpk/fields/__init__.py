"""What has reached a parameter, and what extensions make of it."""
