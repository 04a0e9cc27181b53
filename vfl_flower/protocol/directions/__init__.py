"""Directions of zeroth order: how they are drawn, and differences of losses along them."""
