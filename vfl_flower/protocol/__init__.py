"""Protocols of the five axes of the design space, with both ends of each."""
