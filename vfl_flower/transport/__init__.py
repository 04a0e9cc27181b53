"""Transports of messages."""
