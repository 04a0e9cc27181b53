"""Drift: the columns of rows that are scored now, beside those of training, at both ends."""
