"""Codec axis: encode blocks of rows as arrays of a message, and decode them."""
