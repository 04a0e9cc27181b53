"""What carries messages, and what starts it."""
