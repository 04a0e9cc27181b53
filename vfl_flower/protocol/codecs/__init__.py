"""Codec axis: how a block of rows becomes arrays in a message, and rows again."""
