"""Drift: columns of rows that are scored now, beside columns of training, at both ends."""
