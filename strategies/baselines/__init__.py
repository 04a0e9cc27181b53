"""Baselines, with which systems are compared."""
