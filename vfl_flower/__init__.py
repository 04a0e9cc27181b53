"""Vertical federated learning on Flower: what a party and the label holder run."""
