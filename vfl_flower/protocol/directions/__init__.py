"""Directions of zeroth-order systems, and differences of losses along them."""
