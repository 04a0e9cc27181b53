"""Drift of columns between training and the people that are scored: both halves of the task."""
