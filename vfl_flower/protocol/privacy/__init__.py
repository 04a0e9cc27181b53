"""Privacy: a `mechanism` of noise, an `accountant` of its cost, a `release_log`."""
